"""docs/MASKS.md: every spelling in it runs, takes the bytes that it says, and what its tables say is what masks show."""
import math
import os
import re
import sys

import numpy as np
import pytest
from conftest import ROOT

import attnd.masks as m
from attnd.masks.sizes import Sizes
from attnd.masks.wire import serialize

with open(os.path.join(ROOT, "docs/MASKS.md"), encoding="utf-8") as file:
    TEXT = file.read()
N = 16384
ROW = np.arange(N)
NAMES = {  # of the second and third table
    "m": m, "cu": np.arange(0, N + 1, N // 16), "first": ROW % 128, "stride": np.full(N, 128), "count": np.full(N, 128),
    "pattern": np.random.default_rng(1).random((N // 32, N // 32)) < 0.05, "dense": np.eye(64, dtype=bool),
    "indices": np.full((1, 1, N, 1), N), "array": np.eye(64, dtype=bool), "mask_mod": lambda b, h, q, k: q >= k,
    "rows": 64, "keys": 64, "causal": True, "cu_seqlens": [0, 10, 64], "mask_func": np.ones((1, 1, 64), int),
    "q_ranges": [(0, 64)], "k_ranges": [(0, 64)], "types": [1], "indptr": [0, 1], "R": 64, "C": 64,
    "config": {"mode": "dense", "block": 16}, "length": 64}


def table(heading):
    """Cells of each row."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.split("\n") if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in rows[2:]]


def spellings(cell):
    return [code for code in re.findall(r"`([^`]+)`", cell) if code.startswith("m.")]


def test_pictures_are_of_these_masks(tmp_path):
    """`./dev docs` draws them; each kind of the table is on the first."""
    sys.path.insert(0, os.path.join(ROOT, "tools/documents"))
    import mask_pictures
    mask_pictures.main(str(tmp_path))
    for name in mask_pictures.PICTURES:
        with open(os.path.join(ROOT, f"docs/pictures/{name}.svg"), encoding="utf-8") as file:
            assert (tmp_path / f"{name}.svg").read_text() == file.read(), f"{name}: run ./dev docs"
    drawn = {title.split("(")[0] for title in mask_pictures.KINDS}
    kinds = {code.split("(")[0] for row in table("What each one shows") for code in re.findall(r"`([^`]+)`", row[0])}
    assert drawn == kinds - {"all_"}


@pytest.mark.parametrize("row", table("Known masks"), ids=lambda row: row[0])
def test_known_masks_take_the_bytes_that_are_said(row):
    _, cell, said = row
    assert spellings(cell)
    for code, bytes_said in zip(spellings(cell), said.split("; ")):
        names = NAMES
        if "indices" in code:
            per, count, size = "a key", N, N
        elif "runs(" in code:
            per, count, size = "a row", N, N
        else:
            per, count, size = "", 1, 64 if code == "m.bits(dense)" else N
        got = len(serialize(eval(code, names), Sizes(1, 16, size, size)))
        if bytes_said.endswith(per) and per:
            low, high = [float(x) for x in re.findall(r"\d+", bytes_said)]
            assert low <= round(got / count) <= high, (code, got)
        elif bytes_said == "rows · keys / 8":
            assert 64 * 64 // 8 <= got <= 64 * 64 // 8 + 32
        elif bytes_said.endswith(" K"):
            assert math.isclose(got / 1024, float(bytes_said[:-2]), rel_tol=0.1), (code, got)
        else:
            assert got == int(bytes_said), (code, got)


SMALL = {"left": 2, "right": 1, "step": 3, "p": 4, "phase": 1, "lo": 1, "hi": 3, "shift": 2, "rows": [(2, 4)], "cols": [5],
         "lengths": 6, "cu_seqlens": [0, 5, 12], "row_ids": np.arange(12) % 3, "key_ids": np.arange(12) % 4, "block": 2,
         "per_row": 2, "seed": 3, "layout": np.random.default_rng(2).random((4, 4)) < 0.5, "size": (3, 3), "begin": [1] * 12,
         "end": [7] * 12, "first": [1] * 12, "stride": [2] * 12, "count": [4] * 12, "dense": np.tri(12, dtype=bool)}
SHOWS = {  # the second column in Python, of row I = position Q and key J
    "causal()": lambda I, J: J <= I, "all_()": lambda I, J: True,
    "window(left, right)": lambda I, J: I - 2 <= J <= I + 1,
    "dilated(step, left, right)": lambda I, J: (I - J) % 3 == 0 and -6 <= J - I <= 3,
    "stride(p, phase)": lambda I, J: (I - J) % 4 == 1,
    "stride_columns(p, lo, hi)": lambda I, J: 1 <= J % 4 < 3,
    "block_window(p, lo, hi, shift)": lambda I, J: 1 <= (J + 2) // 4 - (I + 2) // 4 <= 3,
    "global_(rows, cols)": lambda I, J: 2 <= I < 4 or J == 5,
    "prefix(lengths)": lambda I, J: J < 6,
    "documents(cu_seqlens)": lambda I, J: (I < 5) == (J < 5),
    "groups(row_ids, key_ids)": lambda I, J: I % 3 == J % 4 != 0,
    "blocks(layout, size)": lambda I, J: SMALL["layout"][I // 3, J // 3],
    "intervals(begin, end)": lambda I, J: 1 <= J < 7,
    "runs(first, stride, count)": lambda I, J: J in (1, 3, 5, 7),
    "rectangles([...])": lambda I, J: 2 <= I < 9 and 3 <= J < 9 and 9 - J >= 9 - I,
    "bits(dense)": lambda I, J: J <= I,
}


def test_each_kind_shows_what_its_row_says():
    kinds = [code for row in table("What each one shows") for code in re.findall(r"`([^`]+)`", row[0])]
    assert {*kinds} == {*SHOWS, "random_blocks(block, per_row, seed)"}
    for code, shows in SHOWS.items():
        call = code.replace("[...]", "[(2, 9, 3, 9, 'causal')]")
        dense = eval("m." + call, {"m": m, **SMALL}).to_dense(1, 1, 12, 12)[0, 0]
        expected = [[bool(shows(i, j)) for j in range(12)] for i in range(12)]
        np.testing.assert_array_equal(dense, expected, err_msg=code)
    dense = m.random_blocks(2, 2, 3).to_dense(1, 1, 12, 12)[0, 0]
    assert (dense.reshape(6, 2, 6, 2).all((1, 3)).sum(1) == 2).all() and dense.sum() == 12 * 4


@pytest.mark.parametrize("row", table("From other libraries"), ids=lambda row: row[0])
def test_importers_take_what_they_say(row):
    codes = spellings(row[1])
    if any(name in row[0] for name in ("mask_mod", "BlockMask", "torch", "transformers")):
        torch = pytest.importorskip("torch")
        from torch.nn.attention.flex_attention import create_block_mask
        names = {**NAMES, "block_mask": create_block_mask(NAMES["mask_mod"], None, None, 64, 64, "cpu", BLOCK_SIZE=16),
                 "matrix": torch.eye(64).to_sparse_csr(), "indices": [0]}
    else:
        names = {**NAMES, "indices": [0] if "from_bsr" in row[1] else NAMES["indices"]}
    assert codes or "by themselves" in row[1]
    for code in codes:
        assert isinstance(eval(code, names), m.Mask), code
