"""Forward under masks beside a block-sparse kernel in Triton (triton_masks.py), both simulated: volta-report --triton.

Triton 2.3.0 compiles the kernel for sm_70. Each mask gets the fastest of SETTINGS, tiles that fit the mask's own, whole
tiles without rules, the rule of a partial one in closed form, blocks in the product's order (most work first) and, of three
schedules, the first alone. The strided mask also by residues: dense problems of a residue's rows, as the product does it.
"""
import struct

import numpy as np

import traced_blocks
import triton_cubin
import volta_masks
from voltasim.execute import Memory
from voltasim.traced import TracedPredictor

# By head_dim: rows, keys, warps, stages.
SETTINGS = {64: ((128, 64, 8, 2), (64, 64, 4, 2)), 128: ((64, 128, 8, 1), (64, 64, 8, 2))}
TYPES = {"Q": "*fp16", "K": "*fp16", "V": "*fp16", "O": "*fp16", "Lse": "*fp32", "full_from": "*i32", "full_at": "*i32",
         "partial_from": "*i32", "partial_at": "*i32", "table": "*i32", "n": "i32", "scale_log2": "fp32"}
STEPS, LISTS, TENSORS, PARAMETERS = (8, 7), 0x2000000, 0x7000000000, 0x160
SIZE = 64       # of what masks of N = 4096 are made


def rules():
    """{a family of volta_masks: (RULE, SIZE)}."""
    return {"causal": ("causal", SIZE), "causal window 256": ("window", 256), f"band ±{SIZE}": ("band", SIZE),
            "own and previous block of 64": ("blocked", SIZE), "BigBird, blocks of 64": ("listed", SIZE),
            f"strided {volta_masks.STRIDE}": ("strided", volta_masks.STRIDE)}


class Tiles:
    """A setting's, as volta_masks asks for them."""
    backward = False

    def __init__(self, setting):
        self.owned, self.step = setting[:2]

    def tile(self):
        return self.owned, self.step


class Speeds:
    """Keeps, for a setting and a rule, the TracedPredictor.rates of tiles that are whole or partial."""

    def __init__(self, head_dim, setting, rule, partial, nvdisasm):
        triton_cubin.stub_torch()
        import triton_masks
        rows, keys, warps, stages = setting
        constants = {"RULE": rule[0], "SIZE": rule[1], "D": head_dim, "BLOCK_M": rows, "BLOCK_N": keys}
        image, meta = triton_cubin.compile_kernel(triton_masks.forward, TYPES, constants, warps, stages)
        listing, kernel = traced_blocks.read_kernel(image, meta["name"], nvdisasm)
        shared = kernel.smem_static + meta["shared"]
        traces, factors = traced_blocks.trace(listing, warps, shared, {n: self._launch(n, partial, warps) for n in STEPS})
        self.predictor = TracedPredictor(traced_blocks.setup_of(listing, kernel, shared, factors), traces)
        self.rates = [self.predictor.rates()]

    @staticmethod
    def _launch(steps, partial, warps):
        """(constants, memory) of a block with a list of so many tiles."""
        memory, counts = Memory(), (0, steps) if partial else (steps, 0)
        for n, count in enumerate(counts):
            memory.write(LISTS + n * 0x20000, struct.pack("<2i", 0, count))
            memory.write(LISTS + n * 0x20000 + 0x10000, struct.pack(f"<{steps}i", *range(steps)))
        pointers = [TENSORS + (k << 32) for k in range(5)] + [LISTS + k * 0x10000 for k in range(4)] + [TENSORS + (5 << 32)]
        words = struct.unpack("<22I", struct.pack("<10Qif", *pointers, 4096, 0.18))
        return {0x0: 32 * warps, 0x28: 0xFFFDC0, **{PARAMETERS + 4 * k: word for k, word in enumerate(words)}}, memory


def rows(dense, kernels, length, heads, nvdisasm):
    """One dictionary a mask: cycles of the product's fastest kernel (`dense`, `kernels`: as volta_masks.rows takes them)
    and of Triton's."""
    shape, head_dim = dense[0], dense[0].head_dim
    whole = {s: Speeds(head_dim, s, ("band", SIZE), False, nvdisasm) for s in SETTINGS[head_dim]}
    out, families = [], volta_masks.families(length)
    for name, rule in rules().items():
        other = {s: volta_masks.cycles(families[name], Tiles(s), heads, whole[s],
                                       Speeds(head_dim, s, rule, True, nvdisasm)) for s in whole}
        own = [volta_masks.cycles(families[name], tiles, heads, *speeds) for tiles, *speeds in kernels.values()]
        out.append(row(name, head_dim, min(own), other))
    size = length // volta_masks.STRIDE
    each = {s: volta_masks.of_problems(whole[s], Tiles(s), size, volta_masks.STRIDE * heads) for s in whole}
    own = volta_masks.of_problems(dense[1], shape, size, volta_masks.STRIDE * heads)
    return out + [row(f"strided {volta_masks.STRIDE} by residues", head_dim, own, each)]


def row(name, head_dim, own, other):
    setting = min(other, key=other.get)
    return {"mask": name, "head_dim": head_dim, "own": own, "triton": other[setting], "setting": setting}


def print_table(table, clock_mhz):
    print("Forward under masks beside a block-sparse kernel in Triton 2.3.0. Simulated (voltasim).")
    print(f"{'mask':30s} {'D':>3s} {'attnd ms':>8s} {'Triton ms':>9s} {'ratio':>6s}  rows, keys, warps, stages")
    for r in table:
        own, other = (r[key] / clock_mhz / 1000 for key in ("own", "triton"))
        print(f"{r['mask']:30s} {r['head_dim']:3d} {own:8.3f} {other:9.3f} {other / own:6.2f}  {r['setting']}")
    for dim in sorted({r["head_dim"] for r in table}):
        own, other = ({r["mask"]: r[key] for r in table if r["head_dim"] == dim} for key in ("own", "triton"))
        shared = [other[mask] / own[mask] for mask in own if "strided" not in mask]
        tiles = f"strided {volta_masks.STRIDE}"
        residues = f"{tiles} by residues"
        print(f"geometric mean, D {dim}: " + ", ".join(
            f"{how} {np.exp(np.mean(np.log(shared + [other[theirs] / own[ours]]))):.2f}" for how, ours, theirs in (
                ("strided by tiles", tiles, tiles), ("by residues", residues, residues),
                ("attnd by residues as it does, Triton by tiles", residues, tiles))))
