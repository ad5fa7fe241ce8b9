"""How fast the products of linear layers would run on a V100: ./dev volta-report --products.

Runs one block of each product kernel of sm_70 in voltasim's interpreter, then simulates whole launches at the sizes
of layers: 16,384 rows of widths d, weights of d x d, 3d and 4d. Shares are those of the loop alone, of whole blocks
(with what is before and after the loop) and of the launch (with SMs that idle in its last wave). Simulated (voltasim),
no V100 was used.
"""
import struct

import traced_blocks
from voltasim.execute import Memory
from voltasim.traced import TracedPredictor

SMS = 80
ROWS, WIDTHS, TIMES = 16384, (768, 1024, 2048, 4096), (1, 3, 4)
TILE, STEP, BLOCK_DEPTH = 128, 32, 1024     # kernels/dense/product_params.h
STORE, ADD_BLOCKS, FLOAT32, FLOAT16 = 0, 2, 3, 1
DENSE = 0x30                                # of LaunchParams.dense
DESC, TENSORS = 0x1000000, 0x7000000000     # tensors read as zero
STEPS = (16, 15)


def product_desc(depth, sums):
    """ProductDesc of one tile. Of sums the traced block is the second, the last: its turn comes at once."""
    bias = 0 if sums else TENSORS + (3 << 32)
    tensors = struct.pack("<QQQQ", TENSORS, TENSORS + (1 << 32), bias, TENSORS + (2 << 32))
    depth, result, element = (depth + BLOCK_DEPTH, ADD_BLOCKS, FLOAT32) if sums else (depth, STORE, FLOAT16)
    return tensors + struct.pack("<qqqiiiiiiQ", 4096, 4096, 4096, TILE, TILE, depth, result, FLOAT16, element,
                                 TENSORS + (4 << 32))


def launch(steps, sums, parameters):
    """(constants, memory) of a block of so many steps."""
    memory = Memory()
    memory.write(DESC, product_desc(steps * STEP, sums))
    memory.write(TENSORS + (4 << 32), struct.pack("<i", sums))
    return {0x0: 256, 0x28: 0xFFFDC0, parameters + DENSE: DESC & 0xFFFFFFFF, parameters + DENSE + 4: DESC >> 32}, memory


def sizes(kind):
    """(rows, columns, depth) of C = A·B: outputs of layers, their inputs' gradients, gradients of weights."""
    for width in WIDTHS:
        for times in TIMES:
            if kind == "depth_depth":
                yield times * width, width, ROWS
            else:
                yield (ROWS, times * width, width) if kind == "rows_rows" else (ROWS, width, times * width)


def simulate(key, kernel, listing, shared, schedules, parameters, peak):
    """[(rows, columns, depth, shares of peak in % of loop, blocks and launch)] of one kernel; its bank conflicts."""
    kind = key.split("product_")[1]
    sums = kind == "depth_depth"
    traces, factors = traced_blocks.trace(listing, kernel.threads // 32, shared,
                                          {n: launch(n, sums, parameters) for n in STEPS}, block_index=int(sums))
    runs = []
    for schedule in schedules:
        setup = traced_blocks.setup_of(listing, kernel, shared, factors, *schedule)
        predictor = TracedPredictor(setup, traces)
        runs.append((predictor, predictor.rates()))
    ctas = setup.ctas
    in_loop = runs[0][0].loop_addresses()
    rows = []
    for m, n, k in sizes(kind):
        turns = k // BLOCK_DEPTH if sums else 1
        blocks = -(-m // TILE) * -(-n // TILE) * turns
        steps, shares = k // turns // STEP, []
        for predictor, rates in runs:
            loop, outside = rates[ctas]
            each = blocks / ctas / SMS
            cycles = (each * steps * loop, each * (steps * loop + outside),
                      predictor.launch([steps] * blocks, rates)["cycles"])
            shares.append([100 * 2 * m * n * k / c / peak for c in cycles])
        rows.append((m, n, k, *min(shares, key=lambda of: of[-1])))
    return rows, round(sum(f - 1 for a, f in factors.items() if a in in_loop and f > 1.01), 2)


def print_table(table):
    print("Products of layers: share of peak in %, launch share lowest of gto, lrr, stagger 500. Simulated.")
    print(f"{'kernel':24s} {'rows':>6s} {'columns':>7s} {'depth':>6s} {'loop':>6s} {'blocks':>6s} {'launch':>6s}")
    for key, rows in table:
        for m, n, k, *shares in rows:
            print(f"{key:24s} {m:6d} {n:7d} {k:6d} " + " ".join(f"{share:6.1f}" for share in shares))
