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
GELU = 2                                    # kernels/dense/curves.h
LISTED = 64                                 # kernels/dense/listed_params.h
DENSE = 0x30                                # of LaunchParams.dense
DESC, TENSORS = 0x1000000, 0x7000000000     # tensors read as zero
STEPS = (16, 15)


def product_desc(depth, sums, beside):
    """ProductDesc of one tile. `beside`: its numbers pass through GELU ("value") or by its slope ("slope"), or A's
    columns are summed ("sums").

    Of sums the traced block is the second, the last: its turn comes at once.
    """
    bias = 0 if sums and beside != "sums" else TENSORS + (3 << 32)
    tensors = struct.pack("<QQQQ", TENSORS, TENSORS + (1 << 32), bias, TENSORS + (2 << 32))
    depth, result, element = (depth + BLOCK_DEPTH, ADD_BLOCKS, FLOAT32) if sums else (depth, STORE, FLOAT16)
    values = TENSORS + (5 << 32)
    return tensors + struct.pack("<qqqiiiiiiQi4xQQ", 4096, 4096, 4096, TILE, TILE, depth, result, FLOAT16, element,
                                 TENSORS + (4 << 32), GELU if beside in ("value", "slope") else 0,
                                 values * (beside == "value"), values * (beside == "slope"))


def constants(parameters, jumps):
    """Constants of a kernel whose descriptor is DESC: bank 0, and its tables of branches in bank 2."""
    tables = {(2, 4 * n): word for n, (word,) in enumerate(struct.iter_unpack("<I", jumps))}
    return {0x0: 256, 0x28: 0xFFFDC0, parameters + DENSE: DESC & 0xFFFFFFFF, parameters + DENSE + 4: DESC >> 32} | tables


def launch(steps, sums, parameters, jumps, beside, before):
    """(constants, memory) of a block of so many steps, of a product that has so many before it in its launch."""
    memory, descs = Memory(), (before + 1) * product_desc(steps * STEP, sums, beside)
    if sums:
        ends = [2 * (n + 1) for n in range(before + 1)] + [(1 << 31) - 1] * (LISTED - before - 1)
        descs = struct.pack(f"<{LISTED}i", *ends) + descs
    memory.write(DESC, descs)
    memory.write(TENSORS + (4 << 32), struct.pack("<i", sums))
    return constants(parameters, jumps), memory


def sizes(kind):
    """(rows, columns, depth) of C = A·B: outputs of layers, their inputs' gradients, gradients of weights."""
    for width in WIDTHS:
        for times in TIMES:
            if kind == "depth_depth":
                yield times * width, width, ROWS
            else:
                yield (ROWS, times * width, width) if kind == "rows_rows" else (ROWS, width, times * width)


class Speeds:
    """Keeps what blocks of one product kernel take under each schedule."""

    def __init__(self, key, listing, kernel, shared, schedules, parameters, beside=None, before=0):
        self.kind = key.split("product_")[1]
        self.sums = self.kind == "depth_depth"
        traces, self.factors = traced_blocks.trace(listing, kernel.threads // 32, shared,
                                                   {n: launch(n, self.sums, parameters, kernel.jumps, beside, before)
                                                    for n in STEPS},
                                                   block_index=int(self.sums) * (2 * before + 1))
        self.runs = []
        for schedule in schedules:
            setup = traced_blocks.setup_of(listing, kernel, shared, self.factors, *schedule)
            predictor = TracedPredictor(setup, traces)
            self.runs.append((predictor, predictor.rates()))
        self.ctas = setup.ctas

    def cycles(self, m, n, k):
        """Cycles of C = A·B's (loops alone, whole blocks, launch) under the schedule of the slowest launch."""
        turns = -(-k // BLOCK_DEPTH) if self.sums else 1
        blocks = -(-m // TILE) * -(-n // TILE) * turns
        steps, of_schedules = k // turns // STEP, []
        for predictor, rates in self.runs:
            loop, outside = rates[self.ctas]
            each = blocks / self.ctas / SMS
            of_schedules.append((each * steps * loop, each * (steps * loop + outside),
                                 predictor.launch([steps] * blocks, rates)["cycles"]))
        return max(of_schedules, key=lambda of: of[-1])

    def rates(self):
        """[(cycles of a step, of a block besides)] with one block on an SM, with two, ... of the slowest schedule."""
        slowest = max((rates for _, rates in self.runs), key=lambda of: STEPS[0] * of[self.ctas][0] + of[self.ctas][1])
        return [slowest[n + 1] for n in range(self.ctas)]


def gradient_cycles(plain, summing, sizes, depth):
    """Cycles of one launch of gradients C = A·B of these (rows, columns), of the slowest schedule.

    `plain`, `summing`: Speeds of a block in the midst of them. Those of C's first columns sum A's columns.
    """
    turns = -(-depth // BLOCK_DEPTH)
    tiles = [(-(-m // TILE), -(-n // TILE)) for m, n in sizes]
    blocks = turns * sum(m * n for m, n in tiles)
    share = turns * sum(m for m, _ in tiles) / blocks
    work, cycles = [depth // turns // STEP] * blocks, []
    for (predictor, rates), (_, slower) in zip(plain.runs, summing.runs):
        mixed = {n: [a + share * (b - a) for a, b in zip(rates[n], slower[n])] for n in rates}
        cycles.append(predictor.launch(work, mixed)["cycles"])
    return max(cycles)


def simulate(key, listing, kernel, shared, schedules, parameters, peak):
    """([(rows, columns, depth, shares of peak in % of loop, blocks and launch)], Speeds.rates()) of one kernel."""
    speeds = Speeds(key, listing, kernel, shared, schedules, parameters)
    rows = [(m, n, k, *(100 * 2 * m * n * k / c / peak for c in speeds.cycles(m, n, k)))
            for m, n, k in sizes(speeds.kind)]
    return rows, speeds.rates()


def print_table(table):
    print("Products of layers: share of peak in %, launch share lowest of gto, lrr, stagger 500. Simulated.")
    print(f"{'kernel':24s} {'rows':>6s} {'columns':>7s} {'depth':>6s} {'loop':>6s} {'blocks':>6s} {'launch':>6s}")
    for key, rows, _ in table:
        for m, n, k, *shares in rows:
            print(f"{key:24s} {m:6d} {n:7d} {k:6d} " + " ".join(f"{share:6.1f}" for share in shares))
    print(f"Cycles of a block for {STEP} of the depth + besides, by how many blocks an SM has (modules/segments/bound.cc):")
    for key, _, rates in table:
        print(f"{key:24s} " + ", ".join(f"{step:.0f} + {besides:.0f}" for step, besides in rates))
