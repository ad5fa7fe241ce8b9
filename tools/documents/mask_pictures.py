"""Draws the pictures of docs/MASKS.md, each kind of mask and the known ones: a part of `./dev docs`.

    PYTHONPATH=client/python python3 tools/documents/mask_pictures.py [FOLDER]      (needs numpy; FOLDER: docs/pictures)

A picture is a grid of squares. In each a row is a query, from the top, and a column a key, from the left; blue is visible.
"""
import os
import sys

import numpy as np

import attnd.masks as m

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIDE, GAP, TITLE, COLUMNS = 144, 24, 40, 4  # pixels, and squares in a line
VISIBLE, HIDDEN, INK = "#2563eb", "#e5e7eb", "#111827"
ROW = np.arange(24)

KINDS = {  # at 24 tokens
    "causal()": m.causal(),
    "window(4, 2)": m.window(4, 2),
    "dilated(3, 3, 2)": m.dilated(3, 3, 2),
    "stride(4, 1)": m.stride(4, 1),
    "stride_columns(6, 4, 6)": m.stride_columns(6, 4, 6),
    "block_window(6, -1, 0)": m.block_window(6, -1, 0),
    "global_(rows=[(0, 3)],\n  cols=[8])": m.global_(rows=[(0, 3)], cols=[8]),
    "prefix(9)": m.prefix(9),
    "documents([0, 7, 15, 24])": m.documents([0, 7, 15, 24]),
    "groups(ids)\nids = row // 4 % 3 + 1": m.groups(ROW // 4 % 3 + 1),
    "random_blocks(4, 2,\n  seed=3)": m.random_blocks(4, 2, seed=3),
    "blocks(layout, 6)": m.blocks(np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]], bool), 6),
    "intervals(row // 2,\n  row + 1)": m.intervals(ROW // 2, ROW + 1),
    "runs(row % 5, 5, 3)": m.runs(ROW % 5, np.full(24, 5), np.full(24, 3)),
    "rectangles([(3, 17, 5, 19,\n  'causal')])": m.rectangles([(3, 17, 5, 19, "causal")]),
    "bits(dense)": m.bits(np.random.default_rng(1).random((24, 24)) < 0.3),
}
KNOWN = {  # their spellings in the table, made smaller for 64 tokens
    "sliding window": m.window(15, 0),
    "Longformer": m.window(6, 6) | m.global_(rows=[(0, 3)], cols=[(0, 3)]),
    "BigBird": m.window(4, 4) | m.global_(rows=[(0, 4)], cols=[(0, 4)]) | m.random_blocks(4, 2, seed=1),
    "Sparse Transformer,\nstrided": m.causal() & (m.window(7, 0) | m.stride(8)),
    "Sparse Transformer,\nfixed": m.causal() & (m.block_window(8) | m.stride_columns(8, 6, 8)),
    "chunks (Llama 4)": m.causal() & m.block_window(16),
    "prefix-LM": m.causal() | m.prefix(20),
    "documents": m.causal() & m.documents([0, 10, 29, 45, 64]),
    "one question,\nseveral answers": m.causal() & (m.prefix(12) | m.documents([0, 12, 30, 46, 64])),
    "window inside documents": m.window(9, 0) & m.documents([0, 10, 29, 45, 64]),
    "not: all but a window": ~m.window(8, 8),
    "learned blocks": m.blocks(np.random.default_rng(4).random((8, 8)) < 0.25, 8),
}
PICTURES = {"mask_kinds": (KINDS, 24), "known_masks": (KNOWN, 64)}


def runs(row):
    """(begin, end) of each run of visible keys."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(int)))
    return edges.reshape(-1, 2)


def square(title, mask, tokens, x, y):
    cell = SIDE / tokens
    yield f'  <rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{HIDDEN}"/>'
    path = "".join(f"M{x + begin * cell:g} {y + n * cell:g}h{(end - begin) * cell:g}v{cell:g}h{-(end - begin) * cell:g}z"
                   for n, row in enumerate(mask.to_dense(1, 1, tokens, tokens)[0, 0]) for begin, end in runs(row))
    yield f'  <path fill="{VISIBLE}" d="{path}"/>'
    for n, line in enumerate(title.split("\n")):
        yield f'  <text x="{x}" y="{y + SIDE + 13 + 12 * n}" xml:space="preserve">{line}</text>'


def draw(masks, tokens):
    lines = -(-len(masks) // COLUMNS)
    width, height = COLUMNS * (SIDE + GAP) + GAP, lines * (SIDE + TITLE) + GAP
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           f'font-family="monospace" font-size="9" fill="{INK}" role="img">')
    yield f'  <rect width="{width}" height="{height}" fill="white"/>'
    for n, (title, mask) in enumerate(masks.items()):
        yield from square(title, mask, tokens, GAP + n % COLUMNS * (SIDE + GAP), GAP + n // COLUMNS * (SIDE + TITLE))
    yield "</svg>\n"


def main(folder):
    for name, (masks, tokens) in PICTURES.items():
        with open(os.path.join(folder, name + ".svg"), "w", encoding="utf-8") as file:
            file.write("\n".join(draw(masks, tokens)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "docs/pictures"))
