"""How long a BERT layer would take on a V100, launch by launch: ./dev volta-report --layers.

Forward and backward of 16,384 rows with dropout, attention aside, op by op and by segments (docs/KERNELS.md): the
launches that the engine makes. A block of each kernel of numbers, norms, sums and optimizers runs in voltasim's
interpreter, which counts the bytes that it moves; then an SM's share of the launch is simulated, with the memory at
0.80 TB/s. A launch takes that, or what its bytes take at this rate, if that is more. Products are volta_products'.
Simulated (voltasim), no V100 was used.
"""
import struct

import numpy as np
import traced_blocks
import volta_products
from voltasim.execute import Memory
from voltasim.machine import Machine
from voltasim.model import Predictor
from volta_products import DESC, FLOAT16, FLOAT32, GELU, SMS, TENSORS

ROWS, WIDTHS, HBM_BYTES_PER_SECOND = 16384, (768, 2048), 0.80e12
LAUNCH_MICROSECONDS = 1.5                                   # modules/segments/bound.h
ENCODER_WIDTH, ENCODER_HEAD_DIMS, ENCODER_LENGTHS = 2048, (64, 128), (512, 1024, 2048, 4096, 16384)
EAGER_FLOPS_PER_SECOND = 0.90 * 112e12                      # cuBLAS, published for large products
SCALED, SUM, DROP, CURVE, SLOPE = 2, 3, 5, 6, 7             # kernels/dense/dense_params.h: NumbersOp
STEPS = DESC + 0x1000                                       # of chains
THREADS, GROUP, SUM_COLUMNS, SUM_ROWS, SUM_STRETCH, NORM_LANES, STEP_NUMBERS = 256, 8, 32, 1024, 32, 32, 2048
NORM_SUMS_COLUMNS, NORM_SUMS_BYTES = 768, 4 << 20           # listed_params.h, kernels/layers/cuda/launch_queue.h
GRADIENTS_BEFORE = 3                                        # of a layer's six in a launch


class Numbers(Memory):
    """Tensors hold normal numbers in float16 (as float32: positive ones); what was not written elsewhere is zero."""

    WORDS = np.random.default_rng(1).standard_normal(1 << 14).astype(np.float16).view(np.uint32) & 0x7FFFFFFF

    def word(self, address):
        return int(self.WORDS[(address >> 2) % len(self.WORDS)]) if address >= TENSORS else super().word(address)


def tensor(n, element=FLOAT16):
    return struct.pack("<Qi4x", TENSORS + (n << 32) if n else 0, element)


def rule(op):
    return struct.pack("<iifIIIII", op, GELU, 256 / 230, 1, 2, 3, 0, 26)


def step(op, other, out, stores, is_aside=False):
    """NumbersStep."""
    return rule(op) + tensor(other) + tensor(out) + struct.pack("<iiii", 0, 0, stores, is_aside)


def numbers(op, rows, columns, b=0):
    """(kernel, descriptor, tables, blocks) of NumbersDesc."""
    groups = rows * columns // GROUP
    passes = 4 if groups // THREADS >= 4096 else 1
    if op != DROP:
        rows, columns = 1, rows * columns
    desc = tensor(1) + tensor(b) + tensor(3) + struct.pack("<qqqq", columns, columns, rows, columns) + rule(op)
    return "dense_numbers", desc + struct.pack("<iii4x", 0, passes, FLOAT16), b"", -(-groups // THREADS // passes)


def norm(rows, columns, is_backward, before=(), after=(), out=3):
    """The same of NormDesc, with chains."""
    of_norm = struct.pack("<Qi4x", STEPS + 0x10000, FLOAT32), struct.pack("<Qi4x", STEPS + 0x20000, FLOAT32)
    desc = tensor(1) + of_norm[0] + (tensor(0) if is_backward else of_norm[1]) + tensor(2 * is_backward) + tensor(out)
    desc += struct.pack("<QqiiiiiffI", TENSORS + (6 << 32), rows, columns, 1, 0, is_backward, 0, 1e-5, 0, 0)
    desc += tensor(7) + struct.pack("<Qi4xQi4xii", STEPS, len(before), STEPS + 80 * len(before), len(after), FLOAT16,
                                    NORM_LANES)
    return "dense_norm", desc, b"".join((*before, *after)), -(-rows * NORM_LANES // THREADS)


def brings_sums(rows, columns):
    """Whether a norm's gradient leaves sums of stretches: CudaDevice::BringsSums."""
    stretches = rows // SUM_STRETCH
    return (128 < columns <= NORM_SUMS_COLUMNS and rows % SUM_STRETCH == 0 and stretches >= SMS
            and 8 * stretches * columns <= NORM_SUMS_BYTES)


def norm_sums(rows, columns, after, out):
    """The same of NormSumsDesc."""
    _, desc, tables, _ = norm(rows, columns, 1, (), after, out)
    launch = desc + struct.pack("<QQ", TENSORS + (11 << 32), TENSORS + (12 << 32))
    return "dense_norm_sums", launch, tables, rows // SUM_STRETCH


def stretch_sums(stretches, columns):
    """The same of StretchSumsDesc."""
    desc = struct.pack("<QQQQii", *(TENSORS + (n << 32) for n in range(1, 5)), stretches, columns)
    return "dense_stretch_sums", desc, b"", 2 * -(-columns // SUM_COLUMNS)


def sums(rows, *columns, of_norm=False):
    """The same of ColumnSumsDesc, one after the other: of gradients of biases, or of a norm's two parameters."""
    descs, blocks = b"", 0
    for n, count in enumerate(columns):
        of_one = -(-rows // SUM_ROWS) * -(-count // SUM_COLUMNS)
        descs += tensor(1 + n) + struct.pack("<iiqqQQ", FLOAT16, count, rows, SUM_ROWS, TENSORS + (8 << 32),
                                             TENSORS + (9 << 32) if of_norm else 0)
        descs += tensor(7) + struct.pack("<Qi4xQQi4x", TENSORS + (6 << 32), 0, STEPS, TENSORS + (10 << 32), of_one)
        blocks += of_one
    return "dense_column_sums", descs, b"", blocks


def adamw(parameters):
    """The same of StepListDesc, as if they were one tensor."""
    pointers = struct.pack("<QQ", TENSORS + (1 << 32), TENSORS + (2 << 32)) + tensor(3)
    pointers += struct.pack("<QQQq", TENSORS + (4 << 32), TENSORS + (5 << 32), 0, parameters)
    one = pointers + struct.pack("<6i10f", 0, 1, 0, 0, 0, 0, 1, 1e-5, 1e-3, 0, 0, 0.1, 0.999, 0.001, 1, 1e-8)
    return "dense_step", struct.pack("<Qi4x", STEPS, 1), one, -(-parameters // STEP_NUMBERS)


def squares(parameters, totals):
    """The same of SquaresDesc, as if they were one tensor: of runs of numbers, or of what those left."""
    warps = -(-parameters // (32 * 1024))
    desc = struct.pack("<QQQii", STEPS, TENSORS + (2 << 32), TENSORS + (3 << 32) if totals else 0, 1, warps)
    return ("dense_squares", desc, struct.pack("<Qqdi4x", TENSORS + (1 << 32), parameters, 0, 0),
            1 if totals else -(-warps // 4))


def passes(rows, width, direction, fused):
    """{name: (times, launch)} of what is no product."""
    d, inner = width, 4 * width
    behind = [step(SCALED, 0, 8, 1, True), step(DROP, 0, 9, 1)]
    norms = {("forward", True): {"drop + add + norm": norm(rows, d, 0, [step(DROP, 0, 8, 0), step(SUM, 9, 1, 1)])},
             ("forward", False): {"drop": numbers(DROP, rows, d), "add": numbers(SUM, rows, d, 2),
                                  "norm": norm(rows, d, 0)},
             ("backward", True): {"norm's + add's + drop's": norm(rows, d, 1, (), behind, out=9)},
             ("backward", False): {"norm's": norm(rows, d, 1), "add's": numbers(SCALED, rows, d),
                                   "drop's": numbers(DROP, rows, d)}}[direction, fused]
    of_all = {name: (2, launch) for name, launch in norms.items()}
    if direction == "forward":
        return of_all if fused else of_all | {"gelu": (1, numbers(CURVE, rows, inner))}
    if not fused:
        return of_all | {"gelu's": (1, numbers(SLOPE, rows, inner, 2)), "sums of norms": (2, sums(rows, d, of_norm=True)),
                         "sums of biases": (1, sums(rows, d, inner, d, d, d, d))}
    if not brings_sums(rows, d):
        return of_all | {"sums of norms": (2, sums(rows, d, of_norm=True))}
    return {"norm's + add's + drop's + sums": (2, norm_sums(rows, d, behind, 9)),
            "sums of stretches": (2, stretch_sums(rows // SUM_STRETCH, d))}


def products(rows, width, direction, fused):
    """{name: (times, kind of product, curve, rows, columns, depth)}, of all gradients (1, "gradients", sizes, depth)."""
    d, inner = width, 4 * width
    if direction == "forward":
        up = {"up + gelu": (1, "rows_rows", "value", rows, inner, d)} if fused else {
            "up": (1, "rows_rows", None, rows, inner, d)}
        return {"q, k, v, out": (4, "rows_rows", None, rows, d, d)} | up | {"down": (1, "rows_rows", None, rows, d, inner)}
    sizes = ((d, d),) * 4 + ((inner, d), (d, inner))
    gradients = {"dW of all + sums of biases": (1, "gradients", sizes, rows)} if fused else {
        "dW of q, k, v, out": (4, "depth_depth", None, d, d, rows), "dW of up": (1, "depth_depth", None, inner, d, rows),
        "dW of down": (1, "depth_depth", None, d, inner, rows)}
    down = {"dx of down + gelu's": (1, "rows_depth", "slope", rows, inner, d)} if fused else {
        "dx of down": (1, "rows_depth", None, rows, inner, d)}
    return {"dx of q, k, v, out": (4, "rows_depth", None, rows, d, d), "dx of up": (1, "rows_depth", None, rows, d, inner),
            **down, **gradients}


def steps(width):
    """{name: launch} of AdamW on one layer's parameters, and of the norm of its gradients, by the longest matrix."""
    parameters = 12 * width * width + 13 * width
    return {"squares": squares(parameters, False), "sums of squares": squares(4 * width * width, True),
            "AdamW": adamw(parameters)}


class Simulator:
    """Simulates launches by the kernels of an archive, each once."""

    def __init__(self, kernels, schedules, parameters, clock_mhz):
        """`kernels`: {key: (listing, kernel, bytes of its shared memory)}."""
        self.kernels, self.schedules, self.parameters, self.clock_mhz = kernels, schedules, parameters, clock_mhz
        self.machine = Machine(hbm_bytes_per_clk_sm=HBM_BYTES_PER_SECOND / SMS / clock_mhz / 1e6)
        self.passes, self.products = {}, {}

    def microseconds(self, launch):
        """(simulated, what its bytes take) of a launch that is no product."""
        if launch not in self.passes:
            self.passes[launch] = self._simulate(*launch)
        return self.passes[launch]

    def speeds(self, kind, beside, before=0):
        key = "product_" + kind
        if (key, beside, before) not in self.products:
            self.products[key, beside, before] = volta_products.Speeds(key, *self.kernels[key], self.schedules,
                                                                       self.parameters, beside, before)
        return self.products[key, beside, before]

    def of_product(self, kind, *of):
        """The same of a product, or of a layer's gradients of weights with the sums of biases."""
        if kind == "gradients":
            return self._of_gradients(*of)
        curve, m, n, k = of
        # Read and written in float32; written, and what is beside.
        of_c = 8 if kind == "depth_depth" else 4 if curve else 2
        return (self.speeds(kind, curve).cycles(m, n, k)[-1] / self.clock_mhz,
                (2 * (m * k + n * k) + of_c * m * n) / HBM_BYTES_PER_SECOND * 1e6)

    def _of_gradients(self, sizes, depth):
        speeds = [self.speeds("depth_depth", beside, GRADIENTS_BEFORE) for beside in (None, "sums")]
        moved = sum(2 * (m + n) * depth + 8 * m * n for m, n in sizes)
        return (volta_products.gradient_cycles(*speeds, sizes, depth) / self.clock_mhz, moved / HBM_BYTES_PER_SECOND * 1e6)

    def _simulate(self, key, desc, tables, blocks):
        listing, kernel, shared = self.kernels[key]
        memory, warps = Numbers(), kernel.threads // 32
        memory.write(DESC, desc)
        memory.write(STEPS, tables)
        constants = volta_products.constants(self.parameters, kernel.jumps)
        block = traced_blocks.run_block(listing, warps, shared, constants, memory, l1_below=TENSORS)
        cycles = []
        for schedule in self.schedules:
            setup = traced_blocks.setup_of(listing, kernel, shared, block.conflict_factors(), *schedule)
            setup.machine = self.machine
            setup.traffic = block.traffic.averages(self.machine.l1_bytes / setup.ctas - shared)
            cycles.append(sm_cycles(Predictor(setup), [(w.path, -1) for w in block.warps], setup.ctas, -(-blocks // SMS)))
        return max(cycles) / self.clock_mhz, blocks * block.traffic.hbm_bytes() / HBM_BYTES_PER_SECOND * 1e6


def sm_cycles(predictor, paths, ctas, blocks):
    """Cycles of an SM that runs so many blocks, so many at a time; many are extrapolated."""
    few, some = 3 * ctas, 6 * ctas
    if blocks <= some:
        return predictor.simulate(paths, ctas, blocks).cycles
    first, second = (predictor.simulate(paths, ctas, n).cycles for n in (few, some))
    return second + (blocks - some) * (second - first) / (some - few)


def rows(simulator, all_rows):
    """[(rows, width, direction, name, launches, us op by op, us by segments)] of a launch, and of all of them."""
    table = []
    for count in all_rows:
        for width in WIDTHS:
            for direction in ("forward", "backward"):
                table += [(count, width, direction, *line) for line in lines_of(simulator, count, width, direction)]
    for width in WIDTHS:
        for name, launch in steps(width).items():
            us = max(simulator.microseconds(launch))
            table.append((0, width, "step", name, 1, us, us))
    return table


def lines_of(simulator, count, width, direction):
    lines = []
    for launches, measure in ((products, lambda of: simulator.of_product(*of)),
                              (passes, lambda of: simulator.microseconds(*of))):
        op_by_op, segments = (launches(count, width, direction, fused) for fused in (False, True))
        for name, (times, *of) in (op_by_op | segments).items():
            us = max(measure(of))
            lines.append((name, times, us if name in op_by_op else 0, us if name in segments else 0))
    both = [sum(line[1] * (line[n] + LAUNCH_MICROSECONDS) for line in lines if line[n]) for n in (2, 3)]
    return lines + [("all", 1, *both)]


def print_table(table):
    print("BERT layers with dropout, attention aside: us of a launch, and of all with 1.5 us more each. Simulated "
          "(voltasim), memory at 0.80 TB/s.")
    print(f"{'rows':>6s} {'width':>5s} {'direction':9s} {'what':30s} {'launches':>8s} {'op by op':>9s} {'segments':>9s}")
    for count, width, direction, name, times, *both in table:
        cells = " ".join(f"{us:9.1f}" if us else " " * 9 for us in both)
        ratio = f" {both[0] / both[1]:.3f} times" if name == "all" else ""
        print(f"{count or '':6} {width:5d} {direction:9s} {name:30s} {times:8d} {cells}{ratio}")


def eager_microseconds(head_dim, length):
    """One encoder layer forward in eager PyTorch, modelled: products as cuBLAS's best, passes at the memory's rate.

    Scores in float16 are written, scaled (4 bytes), normalised (4), dropped (5, with a mask of bytes) and read.
    Of the layer's width two sums (6), two dropouts (5), two norms (4), a curve of four widths (8) and one copy of the
    heads (2) are read and written; products add biases for nothing, heads are taken apart by strides.
    """
    tensor_bytes, scores = 2 * ROWS * ENCODER_WIDTH, ROWS * length * ENCODER_WIDTH / head_dim
    flops = 24 * ROWS * ENCODER_WIDTH ** 2 + 4 * ROWS * length * ENCODER_WIDTH
    return 1e6 * (flops / EAGER_FLOPS_PER_SECOND + (17 * scores + 25 * tensor_bytes) / HBM_BYTES_PER_SECOND)


def encoder_rows(simulator, attention_cycles):
    """[(head_dim, length, us of attnd's attention, of its layer, of eager's)] of SparkAttention's ten layers, forward.

    `attention_cycles`: of (head_dim, length, heads of all sequences).
    """
    table = []
    rest = sum(times * max(simulator.of_product(*of)) for times, *of in
               products(ROWS, ENCODER_WIDTH, "forward", True).values())
    rest += sum(times * max(simulator.microseconds(launch)) for times, launch in
                passes(ROWS, ENCODER_WIDTH, "forward", True).values())
    for head_dim in ENCODER_HEAD_DIMS:
        for length in ENCODER_LENGTHS:
            heads = ROWS // length * ENCODER_WIDTH // head_dim
            attention = attention_cycles(head_dim, length, heads) / simulator.clock_mhz
            table.append((head_dim, length, attention, rest + attention, eager_microseconds(head_dim, length)))
    return table


def print_encoder_table(table):
    print("One encoder layer forward, width 2048, 16,384 tokens, dropout 0.1, ms. attnd: simulated (voltasim); "
          "eager PyTorch: modelled.")
    print(f"{'head_dim':>8s} {'N':>6s} {'attention':>9s} {'layer':>7s} {'eager':>7s} {'times':>6s}")
    for head_dim, length, attention, layer, eager in table:
        print(f"{head_dim:8d} {length:6d} {attention / 1e3:9.2f} {layer / 1e3:7.2f} {eager / 1e3:7.2f} {eager / layer:6.2f}")
    times = [eager / layer for *_, layer, eager in table]
    print(f"mean {sum(times) / len(times):.2f}, most {max(times):.2f}")
