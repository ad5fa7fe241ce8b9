"""What a launch visits under a mask, and how long that takes from simulated speeds of whole and partial tiles.

Masks over N = 4096 queries and keys (the families that papers on sparse attention measure). A block's work is the
tiles that its line of the mask's lists holds, so the product's order by visits and its tail are in the time. The
strided mask also by residues, as the product sends it: a dense problem a residue, by the kernel without a mask.
"""
import random

import numpy as np

STRIDE, LONG = 64, 16384    # of the strided mask, and where it is looked at once more


def families(n):
    """{name: [n, n] bool}, row i sees key j."""
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
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
    """Of each tile, [lines of tiles, tiles of a line]: whether it shows anything, and whether it shows all."""
    n = len(mask)
    seen = mask.reshape(n // rows, rows, n // keys, keys)
    return seen.any((1, 3)), seen.all((1, 3))


def visits(mask, rows, keys, by_keys):
    """(tiles, those of them that hide something) of each block: of a row tile, or of a key tile."""
    some, every = tiles(mask, rows, keys)
    along = 0 if by_keys else 1
    return some.sum(along), (some & ~every).sum(along)


def cycles(mask, shape, heads, full, partial):
    """Of a launch, the slowest schedule; `full`, `partial`: Speeds of the listed kernel."""
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


def residue_row(dense, shape, length, heads):
    """As `rows`, of the strided mask by residues."""
    own, other = shape.owned, shape.step
    size = length // STRIDE
    of_classes = of_problems(dense, shape, size, STRIDE * heads)
    whole = of_problems(dense, shape, length, heads)
    visited = STRIDE * (-(-size // own) * own) * (-(-size // other) * other) / length ** 2
    return {"mask": f"strided {STRIDE} by residues, N {length}", "head_dim": shape.head_dim,
            "pass": "backward" if shape.backward else "forward", "visible": 1 / STRIDE, "visited": visited,
            "partial": 0.0, "time": of_classes / whole, "efficiency": whole / of_classes / STRIDE}


def rows(dense, full, partial, shape, length, heads):
    """One dictionary a mask: what it visits, its time as a share of dense, and the skip efficiency
    (dense time / time · density; 1 would be a time in proportion to visible scores)."""
    whole = max(dense.predictor.launch(shape.full_work(), rates)["cycles"] for rates in dense.rates)
    out = []
    for name, mask in families(length).items():
        tiles, cut = visits(mask, *shape.tile(), shape.backward)
        share = cycles(mask, shape, heads, full, partial) / whole
        area = shape.tile()[0] * shape.tile()[1] / length ** 2
        out.append({"mask": name, "head_dim": shape.head_dim, "pass": "backward" if shape.backward else "forward",
                    "visible": float(mask.mean()), "visited": float(tiles.sum() * area),
                    "partial": float(cut.sum() * area), "time": share, "efficiency": float(mask.mean()) / share})
    return out + [residue_row(dense, shape, n, heads) for n in (length, LONG)]


def print_table(table):
    print("Masks: shares of all scores in %, time as a share of the dense kernel's in %, skip efficiency "
          "(dense time / time · visible). Simulated.")
    print(f"{'mask':33s} {'pass':8s} {'D':>3s} {'visible':>7s} {'visited':>7s} {'partial':>7s} {'time':>6s} {'effic.':>6s}")
    for r in table:
        print(f"{r['mask']:33s} {r['pass']:8s} {r['head_dim']:3d} {100 * r['visible']:7.2f} {100 * r['visited']:7.2f} "
              f"{100 * r['partial']:7.2f} {100 * r['time']:6.2f} {r['efficiency']:6.2f}")
    for key in sorted({(r["pass"], r["head_dim"]) for r in table}):
        values = [r["efficiency"] for r in table if (r["pass"], r["head_dim"]) == key
                  and r["mask"] != f"strided {STRIDE}" and f"N {LONG}" not in r["mask"]]
        print(f"geometric mean of {key[0]} D {key[1]}, strided by residues: {np.exp(np.mean(np.log(values))):.2f}")
