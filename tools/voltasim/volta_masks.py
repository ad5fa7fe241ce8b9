"""Counts what a launch visits under a mask, and predicts its time from simulated speeds of whole and partial tiles.

Masks over N queries and keys (the families that papers on sparse attention measure), by the kernels of listed and of
small tiles, the faster of which counts: the product chooses by predicted time. A block's work is the tiles that its line
of the mask's lists holds, so the product's order by visits and its tail are in the time. The strided mask by residues, as
the product sends it: a dense problem a residue, by the kernel without a mask.
"""
import random

import numpy as np

STRIDE = 64     # of the strided mask
# Families that are not of the seven whose mean is taken, those of FlexAttention's table.
BESIDES = ("own and previous block of 64", "prefix of a quarter, causal")


def families(n):
    """{name: [n, n] bool}, row i sees key j."""
    i, j = np.arange(n, dtype=np.int32)[:, None], np.arange(n, dtype=np.int32)[None, :]
    root, eighth = int(n ** 0.5), n // 8
    causal, band = j <= i, np.abs(i - j) <= root
    longformer = band | (i < root) | (j < root)
    drawn = random.Random(1)
    blocks = np.array([[drawn.random() < 0.1 for _ in range(n // 64)] for _ in range(n // 64)])
    return {"causal": causal,
            "causal window 256": causal & (i - j <= 256),
            f"band ±{root}": band,
            f"Longformer {root}": longformer,
            "BigBird, blocks of 64": longformer | np.kron(blocks, np.ones((64, 64), bool)),
            "documents of an eighth, causal": causal & (i // eighth == j // eighth),
            "own and previous block of 64": (i // 64 - j // 64 <= 1) & (i // 64 >= j // 64),
            "prefix of a quarter, causal": causal | (j < n // 4),
            f"strided {STRIDE}": (i - j) % STRIDE == 0}


def tiles(mask, rows, keys):
    """Says of each tile, [lines of tiles, tiles of a line], whether it shows anything, and whether it shows all."""
    n = len(mask)
    seen = mask.reshape(n // rows, rows, n // keys, keys)
    return seen.any((1, 3)), seen.all((1, 3))


def visits(mask, rows, keys, by_keys):
    """(tiles, those of them that hide something) of each block: of a row tile, or of a key tile."""
    some, every = tiles(mask, rows, keys)
    along = 0 if by_keys else 1
    return some.sum(along), (some & ~every).sum(along)


def cycles(mask, shape, heads, full, partial):
    """Predicts the slowest schedule of a launch; `full`, `partial`: Speeds of the listed kernel."""
    tiles, cut = visits(mask, *shape.tile(), shape.backward)
    slowest = 0.0
    for whole, hidden in zip(full.rates, partial.rates):
        most = max(whole)
        extra = hidden[most][0] / whole[most][0] - 1
        work = sorted((t + extra * c for t, c in zip(tiles, cut)), reverse=True)
        slowest = max(slowest, full.predictor.launch([w for w in work for _ in range(heads)], whole)["cycles"])
    return slowest


def of_problems(dense, shape, size, count):
    """Cycles of a launch of `count` problems without a mask, of `size` rows and keys. Last tiles are computed whole."""
    work = [-(-size // shape.step)] * (-(-size // shape.owned) * count)
    return max(dense.predictor.launch(work, rates)["cycles"] for rates in dense.rates)


def residue_cycles(dense, shape, length, heads):
    """(cycles of the strided mask as problems, share of all scores that they visit)."""
    own, other, size = shape.owned, shape.step, length // STRIDE
    visited = STRIDE * (-(-size // own) * own) * (-(-size // other) * other) / length ** 2
    return of_problems(dense, shape, size, STRIDE * heads), visited


def rows(dense, kernels, masks, length, heads):
    """One dictionary a mask: what it visits by the fastest of its kernels, its time as a share of dense, and the skip
    efficiency (dense time / time · density; 1 would be a time in proportion to visible scores).

    `dense`: (Shape, Speeds); `kernels`: {name: (Shape, Speeds of whole tiles, Speeds of partial ones)}; `masks`: families.
    """
    shape, out = dense[0], []
    whole = of_problems(dense[1], shape, length, heads)
    for name, mask in masks.items():
        ways = []
        for kernel, (own, full, partial) in kernels.items():
            tiles, cut = visits(mask, *own.tile(), own.backward)
            area = own.tile()[0] * own.tile()[1] / length ** 2
            ways.append((cycles(mask, own, heads, full, partial), kernel, tiles.sum() * area, cut.sum() * area))
        if name.startswith("strided"):
            time, visited = residue_cycles(dense[1], shape, length, heads)
            ways.append((time, "residues", visited, 0))
        time, kernel, visited, cut = min(ways)
        out.append({"length": length, "mask": name, "head_dim": shape.head_dim, "kernel": kernel,
                    "pass": "backward" if shape.backward else "forward", "visible": float(mask.mean()),
                    "visited": float(visited), "partial": float(cut), "time": time / whole,
                    "efficiency": float(mask.mean()) * whole / time})
    return out


def print_table(table):
    print("Masks: shares of all scores in %, time as a share of the dense kernel's in %, skip efficiency "
          "(dense time / time · visible). Simulated.")
    print(f"{'mask':33s} {'N':>6s} {'pass':8s} {'D':>3s} {'kernel':8s} {'visible':>7s} {'visited':>7s} {'partial':>7s} "
          f"{'time':>6s} {'effic.':>6s}")
    for r in table:
        print(f"{r['mask']:33s} {r['length']:6d} {r['pass']:8s} {r['head_dim']:3d} {r['kernel']:8s} "
              f"{100 * r['visible']:7.2f} {100 * r['visited']:7.2f} {100 * r['partial']:7.2f} {100 * r['time']:6.2f} "
              f"{r['efficiency']:6.2f}")
    for key in sorted({(r["length"], r["pass"], r["head_dim"]) for r in table}):
        values = [r["efficiency"] for r in table if (r["length"], r["pass"], r["head_dim"]) == key
                  and r["mask"] not in BESIDES]
        print(f"geometric mean of seven, N {key[0]}, {key[1]}, D {key[2]}: {np.exp(np.mean(np.log(values))):.2f}")
