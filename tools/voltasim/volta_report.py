"""How fast the sm_70 kernels would run on a V100, from their machine code: ./dev volta-report.

Takes the archive that the build makes for sm_70, runs one block of each attention kernel in
voltasim's interpreter (registers, branches, barriers; bank conflicts on the way), then simulates its
steady loop and a whole launch (N = 4096, batch × heads = 64) under three schedules, of which the
lowest counts. Simulated (voltasim), no V100 was used.
"""
import argparse
import json
import os
import random
import struct
import sys
import zlib

import traced_blocks
import volta_layers
import volta_masks
import volta_products
import volta_triton
from voltasim import report
from voltasim.execute import Memory
from voltasim.traced import TracedPredictor

LENGTH, HEADS, CLOCK_MHZ = 4096, 64, 1380.0
SCHEDULES = (("gto", 37), ("lrr", 37), ("gto", 500))
PEAK_FLOPS_PER_CLOCK = 80 * 1024
# Best published on a V100, per cent of 125 TFLOP/s: (head_dim, pass, mask).
PUBLISHED = {(64, "forward", "full"): 32, (128, "forward", "full"): 30,
             (64, "forward", "causal"): 24, (128, "forward", "causal"): 16, (256, "forward", "causal"): 38,
             (64, "backward", "full"): 18, (128, "backward", "full"): 15}
# xformers 0.0.22 on a V100-SXM2-32GB, TFLOP/s as published: forward at N = 4096, backward D 64 at 4096, D 128 at 2048.
XFORMERS = {(64, "forward", "full"): 32.4, (64, "forward", "causal"): 29.2, (128, "forward", "full"): 37.0,
            (64, "backward", "full"): 22.7, (128, "backward", "full"): 19.3}
STEPS = (16, 15)
MASK_LENGTHS = (LENGTH, 16384)
# Blocks of 32 x 32 that SAT's published patterns keep of 1024 (N 1024), and batch × heads of its calls.
SAT_BLOCKS, SAT_LENGTH, SAT_HEADS = {"image": 51, "nature": 39, "news": 81}, 1024, 1024
SMS = 80
VISITS, BLOCKS = (2, 10), 8     # of a block; blocks that follow one another at each place of an SM
SCORES = ("plain", "bias", "alibi", "softcap", "mask")     # what general scores are asked for; bias in float16
# Kinds of tiles of a mask; a general kernel's "mask" has partial ones. Partial tiles take their bits from this many bitmaps.
LISTED, BITMAPS = ("full tiles", "partial tiles"), 8
PARAMETERS = 0x160          # where kernel parameters start in constant bank 0
TABLES = 0x1000000          # our ProblemDesc; then its sequence and the tile list
TENSORS = 0x7000000000      # nothing is stored there: every tensor reads as zero


def read_archive(path):
    """[(key, fields, cubin bytes)] of an archive; a packed cubin is its size and a zlib stream."""
    data = open(path, "rb").read()
    head, _, body = data.partition(b"\nend\n")
    out = []
    for line in head.decode().splitlines()[1:]:        # the first names the format and the target
        key, name, offset, size, threads, shared, registers, spills = line.split()
        out.append((key, {"name": name, "shared": int(shared), "registers": int(registers),
                          "spills": int(spills), "threads": int(threads)},
                    zlib.decompress(body[int(offset) + 8:int(offset) + int(size)])))
    return out


def row_tensor(index, length, head_dim, heads):
    return struct.pack("<Qqqq", TENSORS + (index << 32), length * head_dim * heads, length * head_dim, head_dim)


def problem_desc(shape, length, heads, scores):
    """kernels/rules/params.h: ProblemDesc, for one batch entry; `scores`: one of SCORES or LISTED."""
    head_dim, dropout = shape.head_dim * shape.parts, shape.dropout
    bias = b"\0" * 48
    if scores == "bias":
        bias = struct.pack("<Qqqqiiii", TENSORS + (13 << 32), 0, length * length, length, 1, 1, 1, 0)
    softcap = 30.0 if scores == "softcap" else 0.0
    alibi = TENSORS + (14 << 32) if scores == "alibi" else 0
    d = b"".join(row_tensor(n, length, head_dim, heads) for n in range(4))
    d += struct.pack("<QqqQ", TENSORS + (4 << 32), length * heads, length, TABLES + 0x10000)
    d += struct.pack("<iiiiifff", heads, heads, 1, head_dim // 8, head_dim // 8, 0.125, 0.18, softcap)
    d += bias + struct.pack("<QqiiQ", alibi, heads, 0, 0, 0)
    d += struct.pack("<IfIIIII", 26 if dropout else 0, 256 / 230 if dropout else 1.0, 1, 2, 3, 0, heads)
    d += b"\0" * (-len(d) % 8)
    d += b"".join(row_tensor(n, length, head_dim, heads) for n in range(5, 9))
    d += struct.pack("<QQ", TENSORS + (9 << 32), 0)
    blocks = (length + 63) // 64
    columns = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    d += struct.pack("<QqqqiiQq", TENSORS + (10 << 32), blocks * 64 * columns, 64 * columns, 0, 30, 0,
                     TENSORS + (11 << 32), blocks * 2 * columns)
    d += b"\0" * (584 - len(d))          # up to tile_lists
    if scores == "mask" or scores in LISTED:
        d += struct.pack("<QQQQqqiiiiii", TABLES + 0x30000, TABLES + 0x40000, TABLES + 0x50000, 0, 0, 0,
                         shape.lines(length), 0, *shape.tile(), shape.backward, 0)
    return d + b"\0" * 128


def write_lists(memory, shape, steps, scores):
    """Lists of every tile for every line, as kernels/rules/params.h has them."""
    partial = scores != "full tiles"
    memory.write(TABLES + 0x30000, struct.pack("<4I", 0, steps, 0, 0) * shape.lines(steps * shape.step))
    memory.write(TABLES + 0x40000, struct.pack(f"<{steps}I", *(n | (1 + n % BITMAPS) << 15 if partial else n
                                                                for n in range(steps))))
    rows, keys = shape.tile()
    memory.write(TABLES + 0x50000, random.Random(1).randbytes(BITMAPS * rows * keys // 8))


class Shape:
    """Says what a block of a kernel owns and how many steps it makes."""

    def __init__(self, key):
        words = key.split("_")
        self.backward = words[0] == "backward"
        self.head_dim = int(next(w for w in words if w[0] == "d" and w[1:].isdigit())[1:])
        self.dropout, self.atomic = "dropout" in words, "atomic" in words
        self.half, self.general, self.small = "f16" in words, "general" in words, "small" in words
        self.listed = "listed" in words or self.small
        self.parts = 2 if "f16x3" in words else 1       # a float32 is two float16
        self.owned = {32: 128, 64: 128, 256: 32}.get(self.head_dim, 64) if self.backward else 128
        if self.head_dim * self.parts == 256:
            self.owned = 32 if self.backward else 64
        elif self.backward and self.parts == 2:
            self.owned = 64
        if self.small:
            self.owned = 32
        self.step = 64 if self.backward and not self.small else 32
        self.products = 5 if self.backward else 2

    def tile(self):
        """Rows and keys of a tile that a list counts."""
        return (self.step, self.owned) if self.backward else (self.owned, 32)

    def lines(self, length):
        return -(-length // self.owned)

    def flops_per_step(self):
        return self.products * 2 * self.owned * self.step * self.head_dim

    def full_work(self):
        return [LENGTH // self.step] * (LENGTH // self.owned * HEADS)

    def causal_work(self):
        tiles = range(LENGTH // self.owned)
        return sorted([(t + 1) * self.owned // self.step for t in tiles] * HEADS, reverse=True)


def launch(steps, shape, scores):
    """(constants, memory) of a block of so many steps."""
    length, memory = steps * shape.step, Memory()
    memory.write(TABLES, problem_desc(shape, length, 4, scores))
    if scores == "mask" or scores in LISTED:
        write_lists(memory, shape, steps, scores)
    memory.write(TABLES + 0x10000, struct.pack("<8i", 0, length, 0, length, -(1 << 29), 1 << 29, 0, 0))
    tile = (length + shape.owned - 1) // shape.owned - 1 if shape.backward else 0
    memory.write(TABLES + 0x20000, struct.pack("<4i", 0, 0, 1, tile))
    constants = {0x0: 256, 0x28: 0xFFFDC0}
    for n, pointer in enumerate((TABLES, TABLES + 0x20000)):
        constants[PARAMETERS + 8 * n] = pointer & 0xFFFFFFFF
        constants[PARAMETERS + 8 * n + 4] = pointer >> 32
    constants[PARAMETERS + 16] = 1
    return constants, memory


class Speeds:
    """Keeps, for a kernel and the kind of its scores, the rates of TracedPredictor.rates under each schedule."""

    def __init__(self):
        self.predictor, self.rates = None, []


def read_kernel(fields, image, nvdisasm):
    """(listing, kernel, bytes of its shared memory)."""
    listing, kernel = traced_blocks.read_kernel(image, fields["name"], nvdisasm)
    return listing, kernel, max(kernel.smem_static, fields["shared"])


def simulate(key, fields, image, nvdisasm, scores="plain"):
    """(rows of the report for one kernel, full and causal; its Speeds)."""
    shape = Shape(key)
    listing, kernel, shared = read_kernel(fields, image, nvdisasm)
    traces, factors = traced_blocks.trace(listing, kernel.threads // 32, shared,
                                          {n: launch(n, shape, scores) for n in STEPS})
    steady, shares, speeds = [], {"full": [], "causal": []}, Speeds()
    for schedule in SCHEDULES:
        setup = traced_blocks.setup_of(listing, kernel, shared, factors, *schedule)
        predictor = TracedPredictor(setup, traces)
        steady.append(report.steady_report(predictor, setup, shape.flops_per_step(), CLOCK_MHZ)
                      ["useful_percent_of_peak"])
        rates = predictor.rates()
        speeds.predictor = predictor
        speeds.rates.append(rates)
        for mask, work in (("full", shape.full_work()), ("causal", shape.causal_work())):
            pairs = LENGTH * LENGTH / (2 if mask == "causal" else 1)
            flops = shape.products * 2 * shape.head_dim * pairs * HEADS
            cycles = predictor.launch(work, rates)["cycles"]
            shares[mask].append(100 * flops / cycles / PEAK_FLOPS_PER_CLOCK)
    in_loop = predictor.loop_addresses()
    conflicts = round(sum(f - 1 for a, f in factors.items() if a in in_loop and f > 1.01), 2)
    rows = []
    for mask in ("full", "causal"):
        name = key if scores == "plain" else f"{key} ({scores})"
        rows.append({"kernel": name, "head_dim": shape.head_dim,
                     "pass": "backward" if shape.backward else "forward", "mask": mask,
                     "dropout": shape.dropout, "deterministic": not shape.atomic,
                     "accumulate": "float16" if shape.half else "float32",
                     "registers": kernel.regs, "spills": fields["spills"], "conflicts": conflicts,
                     "steady_share": round(min(steady), 1), "launch_share": round(min(shares[mask]), 1),
                     "code_lines": predictor.code_lines(), "blocks_per_sm": setup.ctas,
                     "tflops_at_1380_mhz": round(min(shares[mask]) * 1.1305, 1),
                     "best_published_share": PUBLISHED.get(
                         (shape.head_dim, "backward" if shape.backward else "forward", mask)),
                     "xformers_tflops": XFORMERS.get(
                         (shape.head_dim, "backward" if shape.backward else "forward", mask))})
    return rows, speeds


def visit_cycles(key, fields, image, nvdisasm):
    """{FULL or PARTIAL: (cycles of an SM for a visit, for a block besides)} of a kernel of masks.

    Blocks of few visits follow one another on an SM, whole from their first instruction to their last.
    """
    listing, kernel, shared = read_kernel(fields, image, nvdisasm)
    shape, out = Shape(key), {}
    for scores in LISTED:
        traces, factors = traced_blocks.trace(listing, kernel.threads // 32, shared,
                                              {n: launch(n, shape, scores) for n in STEPS + VISITS})
        setup = traced_blocks.setup_of(listing, kernel, shared, factors, *SCHEDULES[0])
        ctas, predictor = setup.ctas, TracedPredictor(setup, {n: traces[n] for n in STEPS})
        each = [predictor.simulate(predictor.whole(traces[n]), ctas, BLOCKS * ctas).cycles / (BLOCKS * ctas)
                for n in VISITS]
        slope = (each[-1] - each[0]) / (VISITS[-1] - VISITS[0])
        out[scores] = round(slope), round(each[0] - VISITS[0] * slope)
    return out


def kernels_of_masks(archive, name, nvdisasm):
    """(Shape, Speeds) of the kernel without a mask; {kind: (Shape, Speeds of whole tiles, of partial ones)}."""
    images = {key: (fields, image) for key, fields, image in read_archive(archive)}

    def speeds(key, scores):
        return simulate(key, *images[key], nvdisasm, scores)[1]

    print(f"{name}: begun", file=sys.stderr)
    kinds = {kind: f"{name}_{kind}" for kind in ("listed", "small")}
    return ((Shape(name), speeds(name + "_linear", "plain")),
            {kind: (Shape(key), *(speeds(key, scores) for scores in LISTED)) for kind, key in kinds.items()})


def simulate_masks(archive, only, nvdisasm):
    """Rows of volta_masks for N 4096 and 16,384 and D 64 and 128, forward and backward."""
    names = [f"{way}_d{dim}_f32" for dim in (64, 128) for way in ("forward", "backward")]
    kernels, table = [kernels_of_masks(archive, name, nvdisasm) for name in names if only in name], []
    for length in MASK_LENGTHS:
        masks = volta_masks.families(length)
        for dense, listed in kernels:
            table += volta_masks.rows(dense, listed, masks, length, HEADS * LENGTH // length)
    return table


def simulate_triton(archive, nvdisasm):
    """Rows of volta_triton for D 64 and 128."""
    table = []
    for dim in volta_triton.SETTINGS:
        table += volta_triton.rows(*kernels_of_masks(archive, f"forward_d{dim}_f32", nvdisasm), LENGTH, HEADS, nvdisasm)
    return table


def simulate_products(archive, only, nvdisasm):
    """Rows of volta_products for each product kernel."""
    table = []
    for key, fields, image in read_archive(archive):
        if key.startswith("product_") and only in key:
            table.append((key, *volta_products.simulate(key, *read_kernel(fields, image, nvdisasm), SCHEDULES, PARAMETERS,
                                                        PEAK_FLOPS_PER_CLOCK)))
            print(f"{key}: done", file=sys.stderr)
    return table


def layer_simulator(archive, nvdisasm):
    kernels = {key: read_kernel(fields, image, nvdisasm) for key, fields, image in read_archive(archive)
               if key.startswith(("dense_", "product_"))}
    return volta_layers.Simulator(kernels, SCHEDULES, PARAMETERS, CLOCK_MHZ)


def simulate_encoders(archive, nvdisasm):
    """Rows of volta_layers.encoder_rows."""
    images, speeds = {key: (fields, image) for key, fields, image in read_archive(archive)}, {}

    def attention_cycles(head_dim, length, heads):
        name = f"forward_d{head_dim}_f32_linear_dropout"
        if name not in speeds:
            speeds[name] = simulate(name, *images[name], nvdisasm)[1]
        shape, of = Shape(name), speeds[name]
        work = [length // shape.step] * (length // shape.owned * heads)
        return max(of.predictor.launch(work, rates)["cycles"] for rates in of.rates)

    return volta_layers.encoder_rows(layer_simulator(archive, nvdisasm), attention_cycles)


def simulate_sat(archive, head_dim, nvdisasm):
    """Time of SAT's patterns by small tiles and of the kernels without a mask, main kernels alone."""
    images = {key: (fields, image) for key, fields, image in read_archive(archive)}
    dense, small = {}, {}
    for way in ("forward", "backward"):
        name = f"{way}_d{head_dim}_f32"
        speeds = simulate(name + "_linear", *images[name + "_linear"], nvdisasm)[1]
        shape = Shape(name + "_linear")
        work = [SAT_LENGTH // shape.step] * (SAT_LENGTH // shape.owned * SAT_HEADS)
        dense[way] = max(speeds.predictor.launch(work, rates)["cycles"] for rates in speeds.rates)
        small[way] = visit_cycles(name + "_small", *images[name + "_small"], nvdisasm)["full tiles"]
    for pattern, kept in SAT_BLOCKS.items():
        own = {way: (kept * visit + SAT_LENGTH // 32 * block) * SAT_HEADS / SMS for way, (visit, block) in small.items()}
        print(f"SAT {pattern}, D {head_dim}: time without a mask / by small tiles: " + ", ".join(
            [f"{way} {dense[way] / own[way]:.1f}" for way in own] + [f"both {sum(dense.values()) / sum(own.values()):.1f}"]))


def print_table(rows):
    print("Simulated (voltasim), no V100 was used. Share of peak in %, lowest of gto, lrr, stagger 500; "
          f"N {LENGTH}, batch × heads {HEADS}. Error band: 10 % of time (tools/voltasim/README.md).")
    head = f"{'kernel':40s} {'mask':7s} {'regs':>4s} {'spill':>5s} {'confl':>5s} {'lines':>5s} {'steady':>6s} " \
           f"{'launch':>6s} {'TFLOP/s':>7s} {'published':>9s} {'xformers':>8s}"
    print(head)
    for r in rows:
        best = f"{r['best_published_share']}" if r["best_published_share"] else "–"
        rival = f"{r['xformers_tflops']}" if r["xformers_tflops"] else "–"
        print(f"{r['kernel']:40s} {r['mask']:7s} {r['registers']:4d} {r['spills']:5d} {r['conflicts']:5.2f} "
              f"{r['code_lines']:5d} {r['steady_share']:6.1f} {r['launch_share']:6.1f} "
              f"{r['tflops_at_1380_mhz']:7.1f} {best:>9s} {rival:>8s}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("archive", help="kernels_70.cubins")
    p.add_argument("--only", default="", help="kernels whose name contains this")
    p.add_argument("--general", action="store_true", help="also the kernels with every option (no published rival)")
    p.add_argument("--scores", nargs="+", choices=SCORES, default=["plain"],
                   help="of general kernels: one row for each")
    p.add_argument("--listed", action="store_true", help="also kernels of masks, per visited score: full and partial tiles")
    p.add_argument("--visits", action="store_true", help="instead: what a visit and a block of a mask cost")
    p.add_argument("--masks", action="store_true", help="instead: a table by mask, against the dense kernels")
    p.add_argument("--triton", action="store_true", help="instead: forward under masks, beside Triton's kernels")
    p.add_argument("--products", action="store_true", help="instead: products of layers, by size")
    p.add_argument("--layers", type=int, nargs="*", metavar="ROWS", help="instead: BERT layers of 16,384 rows, or of these")
    p.add_argument("--encoders", action="store_true", help="instead: layers of width 2048 against a modelled eager PyTorch")
    p.add_argument("--sat", type=int, metavar="D", help="instead: SAT's patterns by small tiles, against the dense kernels")
    p.add_argument("--nvdisasm", default=os.environ.get("NVDISASM", ".deps/cuda_tools/nvdisasm"))
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    if args.masks:
        table = simulate_masks(args.archive, args.only, args.nvdisasm)
        print(json.dumps(table, indent=1)) if args.json else volta_masks.print_table(table)
        return
    if args.triton:
        table = simulate_triton(args.archive, args.nvdisasm)
        print(json.dumps(table, indent=1)) if args.json else volta_triton.print_table(table, CLOCK_MHZ)
        return
    if args.products:
        table = simulate_products(args.archive, args.only, args.nvdisasm)
        print(json.dumps(table, indent=1)) if args.json else volta_products.print_table(table)
        return
    if args.layers is not None:
        table = volta_layers.rows(layer_simulator(args.archive, args.nvdisasm), args.layers or [volta_layers.ROWS])
        print(json.dumps(table, indent=1)) if args.json else volta_layers.print_table(table)
        return
    if args.encoders:
        table = simulate_encoders(args.archive, args.nvdisasm)
        print(json.dumps(table, indent=1)) if args.json else volta_layers.print_encoder_table(table)
        return
    if args.sat:
        simulate_sat(args.archive, args.sat, args.nvdisasm)
        return
    if args.visits:
        for key, fields, image in read_archive(args.archive):
            if key.startswith(("forward_", "backward_")) and args.only in key and Shape(key).listed:
                print(key, visit_cycles(key, fields, image, args.nvdisasm), flush=True)
        return
    rows = []
    for key, fields, image in read_archive(args.archive):
        wanted = key.startswith(("forward_", "backward_")) and args.only in key
        if wanted and (args.general or "_general" not in key) and (args.listed or not Shape(key).listed):
            for scores in args.scores if "_general" in key else LISTED if Shape(key).listed else ["plain"]:
                rows += simulate(key, fields, image, args.nvdisasm, scores)[0]
            print(f"{key}: done", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
