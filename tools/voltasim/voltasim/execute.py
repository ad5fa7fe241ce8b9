"""Run a kernel's machine code on chosen warps of one block, to learn the path each takes.

An interpreter of sm_70 SASS: integer, predicate, float and half conversions, shuffles and votes
inside a warp, shared memory, barriers, and global memory as far as it was filled in (unmapped
addresses read as 0). Tensor-core results are 0: fill tensors with nothing and every product is
exact. Lanes may diverge (the lowest program counter runs first).

A path entry is an instruction index i; i + n means predicated off (n instructions in all), and
i + n·(2 + b) a barrier whose number b came from a register. Also counts the wavefronts of every
shared access.
"""
import re
from collections import defaultdict

import numpy as np

from . import isa
from .lanes import wavefronts
from .memory import Memory, Warp  # noqa: F401  (callers import Memory from here)
U32, I32, U64, I64, F32 = np.uint32, np.int32, np.uint64, np.int64, np.float32
_REG = re.compile(r"^(-)?(~)?(\|)?(R\d+|RZ)(\.[A-Z0-9_.]+)?\|?$")
_CONST = re.compile(r"^(-)?(~)?(\|)?c\[0x([0-9a-f]+)\]\[0x([0-9a-f]+)\](\.\w+)?\|?$")
_IMM = re.compile(r"^-?0x[0-9a-f]+$")
_ADDR = re.compile(r"^\[(R\d+|RZ)?(\.[A-Z0-9_.]+)?\+?(-?0x[0-9a-f]+)?\]$")
_PRED = re.compile(r"^!?P(\d|T)$")
_CMP = {"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal}
SHARED_BASE = 1 << 40          # generic addresses of shared memory


class Block:
    """One block; `constants` maps offsets of constant bank 0 to 32-bit words."""

    def __init__(self, listing, constants, memory, warps, shared_bytes, block_index=0, limit=4_000_000):
        self.instrs = listing.instrs
        self.at = {i.addr: i.index for i in listing.instrs}
        self.constants, self.memory = constants, memory
        self.shared = np.zeros(shared_bytes // 4 + 64, dtype=U32)
        self.warps = [Warp(w) for w in warps]
        self.block_index, self.limit = block_index, limit
        self.wave = defaultdict(lambda: [0, 0])
        self.unknown = set()
        self.arrived = {}
        self.ops = [self._decode(i) for i in self.instrs]

    @staticmethod
    def _decode(ins):
        raw = ins.operands
        ops = [re.sub(r"\.reuse", "", o.strip()) for o in raw.split(",")] if raw else []
        return ops

    # -- operands ----------------------------------------------------------------------------
    def _reg(self, tok):
        name = _REG.match(tok).group(4)
        return 255 if name == "RZ" else int(name[1:])

    def _get(self, w, tok, kind="int"):
        m = _REG.match(tok)
        if m:
            neg, inv, mag, name, _ = m.groups()
            v = w.r[255 if name == "RZ" else int(name[1:])]
        else:
            m = _CONST.match(tok)
            if m:
                neg, inv, mag = m.group(1), m.group(2), m.group(3)
                v = np.full(32, self._constant(int(m.group(4), 16), int(m.group(5), 16)), dtype=U32)
            elif _IMM.match(tok):
                return self._typed(np.full(32, int(tok, 16) & 0xFFFFFFFF, dtype=U32), None, None, None, kind)
            else:
                return self._float_literal(tok, kind)
        return self._typed(v, neg, inv, mag, kind)

    @staticmethod
    def _float_literal(tok, kind):
        text = tok.replace("+", "").replace("QNAN", "nan").replace("INF", "inf").replace("-nan", "nan")
        v = np.full(32, float(text), dtype=F32)
        return v if kind == "float" else v.view(U32)

    @staticmethod
    def _typed(v, neg, inv, mag, kind):
        if kind == "float":
            f = v.view(F32)
            if mag:
                f = np.abs(f)
            return -f if neg else f
        if inv:
            v = ~v
        if neg:
            v = (~v + U32(1)).astype(U32)
        return v

    def _constant(self, bank, offset):
        return self.constants.get(offset, 0) if bank == 0 else self.constants.get((bank, offset), 0)

    def _wide(self, w, tok):
        m = _REG.match(tok)
        if m and m.group(4) != "RZ":
            i = int(m.group(4)[1:])
            v = w.r[i].astype(U64) | w.r[i + 1].astype(U64) << U64(32)
            return (~v + U64(1)) if m.group(1) else v
        m = _CONST.match(tok)
        if m:
            bank, off = int(m.group(4), 16), int(m.group(5), 16)
            return np.full(32, self._constant(bank, off) | self._constant(bank, off + 4) << 32, dtype=U64)
        return self._get(w, tok).astype(U64)

    def _predicate(self, w, tok):
        v = w.p[7 if tok.endswith("T") else int(tok[-1])]
        return ~v if tok.startswith("!") else v

    def _put(self, w, tok, v, mask):
        i = self._reg(tok)
        if i != 255:
            w.r[i] = np.where(mask, v.view(U32) if v.dtype == F32 else v.astype(U32), w.r[i])

    def _put_pred(self, w, tok, v, mask):
        if not tok.endswith("T"):
            i = int(tok[-1])
            w.p[i] = np.where(mask, v, w.p[i])

    def _address(self, w, tok):
        m = _ADDR.match(tok)
        base = np.zeros(32, dtype=I64)
        if m.group(1) and m.group(1) != "RZ":
            i = int(m.group(1)[1:])
            base = w.r[i].astype(I64)
            if self._is_global:
                base = base | w.r[i + 1].astype(I64) << 32
            elif m.group(2) and m.group(2).startswith(".X"):
                base = base * int(m.group(2)[2:])
        return base + (int(m.group(3), 16) if m.group(3) else 0)

    # -- running -----------------------------------------------------------------------------
    def run(self):
        """Run all warps to their end, barrier by barrier; returns {warp number: path}."""
        with np.errstate(all="ignore"):
            while any(w.alive.any() for w in self.warps):
                before = sum(len(w.path) for w in self.warps)
                for w in self.warps:
                    self._run_to_barrier(w)
                if sum(len(w.path) for w in self.warps) == before:
                    raise SystemExit("deadlock: all warps wait at barriers that never fill")
        return {w.number: w.path for w in self.warps}

    def _run_to_barrier(self, w):
        while w.alive.any() and w.barrier is None:
            pc = int(w.pc[w.alive].min())
            active = w.alive & (w.pc == pc)
            self._step(w, pc, active)
            if len(w.path) > self.limit:
                raise SystemExit(f"warp {w.number} runs for ever near {self.instrs[pc].addr:#x}")

    def _step(self, w, pc, active):
        ins = self.instrs[pc]
        mask = active & self._predicate(w, ins.pred) if ins.pred else active
        always = ins.pred == "!PT" or ins.stem == "BRA"     # known to do nothing; a branch costs its slot
        w.path.append(pc if mask.any() or always else pc + len(self.instrs))
        w.pc[active] = pc + 1
        if not mask.any():
            return
        handler = getattr(self, "_do_" + ins.stem.lower(), None)
        if handler is None:
            self.unknown.add(ins.opcode)
            return
        handler(w, ins, self.ops[pc], mask)

    # -- control -----------------------------------------------------------------------------
    def _do_bra(self, w, ins, ops, mask):
        if len(ops) > 1 and _PRED.match(ops[0]):
            mask = mask & self._predicate(w, ops[0])
        w.pc[mask] = self.at[ins.target]

    def _do_call(self, w, ins, ops, mask):
        w.pc[mask] = self.at[ins.target]

    def _do_ret(self, w, ins, ops, mask):
        target = self._wide(w, ops[0].split(" ")[0])
        for lane in np.nonzero(mask)[0]:
            w.pc[lane] = self.at.get(int(target[lane]) & 0xFFFFFFFF, 0)

    def _do_exit(self, w, ins, ops, mask):
        w.alive[mask] = False

    def _do_bar(self, w, ins, ops, mask):
        number = int(ops[0], 16) if ops[0].startswith("0x") else int(self._get(w, ops[0])[mask][0])
        if not ops[0].startswith("0x"):
            w.path[-1] = w.path[-1] % len(self.instrs) + len(self.instrs) * (2 + number)
        count = self._get(w, ops[1])[mask][0] // 32 if len(ops) > 1 else len(self.warps)
        self.arrived[number] = self.arrived.get(number, 0) + 1
        if ".ARV" not in ins.opcode:
            w.barrier = number
        if self.arrived[number] >= count:
            self.arrived[number] = 0
            for other in self.warps:
                if other.barrier == number:
                    other.barrier = None

    def _nothing(self, w, ins, ops, mask):
        pass

    _do_bssy = _do_bsync = _do_bmov = _do_break = _do_warpsync = _do_nop = _do_depbar = _nothing
    _do_yield = _do_membar = _do_errbar = _do_cctl = _do_nanosleep = _do_bpt = _nothing

    # -- integer -----------------------------------------------------------------------------
    def _do_mov(self, w, ins, ops, mask):
        self._put(w, ops[0], self._get(w, ops[1]), mask)
    _do_mov32i = _do_mov

    def _do_cs2r(self, w, ins, ops, mask):
        i = self._reg(ops[0])
        for k in range(0 if i == 255 else 1 if ins.opcode.endswith(".32") else 2):
            w.r[i + k] = np.where(mask, 0, w.r[i + k])

    def _do_s2r(self, w, ins, ops, mask):
        lane = np.arange(32, dtype=U32)
        table = {"SR_TID.X": lane + U32(32 * w.number), "SR_LANEID": lane,
                 "SR_CTAID.X": np.full(32, self.block_index, dtype=U32)}
        self._put(w, ops[0], table.get(ops[1], np.zeros(32, dtype=U32)), mask)

    def _split(self, ops):
        return [o for o in ops if not _PRED.match(o)], [o for o in ops if _PRED.match(o)]

    def _do_iadd3(self, w, ins, ops, mask):
        src, preds = self._split(ops)
        out_preds, lead = [], 1
        while lead < len(ops) and _PRED.match(ops[lead]):
            out_preds.append(ops[lead])
            lead += 1
        in_preds = [o for o in ops[lead:] if _PRED.match(o)]
        total = sum(self._get(w, o).astype(U64) for o in src[1:4])
        if ".X" in ins.opcode:
            for p in in_preds:
                total = total + self._predicate(w, p).astype(U64)
        # A negated operand of an .X addition is the complement: the borrow comes as carry.
        if ".X" in ins.opcode:
            for o in src[1:4]:
                if o.startswith("-"):
                    total = (total - U64(1)) & U64(0x1FFFFFFFF)
        carry = total >> U64(32)
        if out_preds:
            # -RZ counts as 2^32 in a subtraction's carry chain.
            extra = sum(1 for o in src[1:4] if o.startswith("-") and o[1:] == "RZ")
            self._put_pred(w, out_preds[0], (carry + U64(extra)) > 0, mask)
        self._put(w, src[0], (total & U64(0xFFFFFFFF)).astype(U32), mask)

    def _do_imad(self, w, ins, ops, mask):
        src, preds = self._split(ops)
        op = ins.opcode
        a, b = self._get(w, src[1]), self._get(w, src[2])
        if ".WIDE" in op:
            if "U32" in op:
                x = a.astype(U64) * b.astype(U64)
            else:
                x = (a.view(I32).astype(I64) * b.view(I32).astype(I64)).astype(U64)
            base = self._wide(w, src[3])
            total = x + base
            i = self._reg(src[0])
            if i != 255:
                w.r[i] = np.where(mask, (total & U64(0xFFFFFFFF)).astype(U32), w.r[i])
                w.r[i + 1] = np.where(mask, (total >> U64(32)).astype(U32), w.r[i + 1])
            if len(ops) > 1 and _PRED.match(ops[1]):
                self._put_pred(w, ops[1], total < base, mask)
            return
        if ".HI" in op:
            x = a.astype(U64) * b.astype(U64) if "U32" in op else (
                a.view(I32).astype(I64) * b.view(I32).astype(I64)).astype(U64)
            self._put(w, src[0], ((x >> U64(32)) + self._get(w, src[3]).astype(U64)).astype(U32), mask)
            return
        v = (a.astype(U64) * b.astype(U64) + self._get(w, src[3]).astype(U64))
        if ".X" in op and len(preds) >= 1:
            v = v + self._predicate(w, preds[-1]).astype(U64)
        self._put(w, src[0], (v & U64(0xFFFFFFFF)).astype(U32), mask)

    def _do_lea(self, w, ins, ops, mask):
        src, preds = self._split(ops)
        out_pred = ops[1] if _PRED.match(ops[1]) else None
        shift = U64(int(src[-1], 16))
        a, b = self._get(w, src[1]).astype(U64), self._get(w, src[2]).astype(U64)
        op = ins.opcode
        if ".HI" in op:
            if "SX32" in op:
                both = self._get(w, src[1]).view(I32).astype(I64).astype(U64)
            else:
                both = a | self._get(w, src[3]).astype(U64) << U64(32)
            total = ((both << shift) >> U64(32)) + b
            if ".X" in op and preds:
                total = total + self._predicate(w, preds[-1]).astype(U64)
        else:
            total = ((a << shift) & U64(0xFFFFFFFF)) + b
        if out_pred:
            self._put_pred(w, out_pred, (total >> U64(32)) > 0, mask)
        self._put(w, src[0], (total & U64(0xFFFFFFFF)).astype(U32), mask)

    def _do_shf(self, w, ins, ops, mask):
        a, s, c = (self._get(w, o) for o in ops[1:4])
        op, parts = ins.opcode, ins.opcode.split(".")
        if "64" in op:
            both = a.astype(U64) | c.astype(U64) << U64(32)
            s = (s & U32(63)).astype(U64)
            if parts[1] == "L":
                v = both << s
            else:
                v = (both.astype(I64) >> s.astype(I64)).astype(U64) if "S64" in op else both >> s
            v = v >> U64(32) if "HI" in parts else v
        else:
            s = np.minimum(s, 32).astype(U64)
            if parts[1] == "L":
                v = (c if "HI" in parts else a).astype(U64) << s
            elif "S32" in op:
                v = ((c if "HI" in parts else a).view(I32).astype(I64) >> s.astype(I64)).astype(U64)
            else:
                v = (c if "HI" in parts else a).astype(U64) >> s
        self._put(w, ops[0], (v & U64(0xFFFFFFFF)).astype(U32), mask)

    def _lut(self, imm, a, b, c, full):
        out = np.zeros_like(a)
        for k in range(8):
            if imm >> k & 1:
                out |= (a if k & 4 else a ^ full) & (b if k & 2 else b ^ full) & (c if k & 1 else c ^ full)
        return out

    def _do_lop3(self, w, ins, ops, mask):
        out_pred = ops.pop(0) if _PRED.match(ops[0]) else None
        try:
            v = self._lut(int(ops[4], 16), *(self._get(w, o) for o in ops[1:4]), U32(0xFFFFFFFF))
            if out_pred:
                self._put_pred(w, out_pred, v != 0, mask)
            self._put(w, ops[0], v, mask)
        finally:
            if out_pred:
                ops.insert(0, out_pred)

    def _do_plop3(self, w, ins, ops, mask):
        v = self._lut(int(ops[5], 16), *(self._predicate(w, o).copy() for o in ops[2:5]), True)
        self._put_pred(w, ops[0], v, mask)

    def _do_prmt(self, w, ins, ops, mask):
        a, sel, c = (self._get(w, o) for o in ops[1:4])
        both = a.astype(U64) | c.astype(U64) << U64(32)
        out = np.zeros(32, dtype=U32)
        for k in range(4):
            nib = (sel >> U32(4 * k)) & U32(15)
            byte = ((both >> ((nib & U32(7)).astype(U64) * U64(8))) & U64(255)).astype(U32)
            out |= np.where(nib & U32(8), np.where(byte & U32(128), U32(255), U32(0)), byte).astype(U32) << U32(8 * k)
        self._put(w, ops[0], out, mask)

    def _do_sel(self, w, ins, ops, mask):
        self._put(w, ops[0], np.where(self._predicate(w, ops[3]), self._get(w, ops[1]), self._get(w, ops[2])), mask)

    def _do_sgxt(self, w, ins, ops, mask):      # the low bits, as many as the second operand says
        bits = self._get(w, ops[2])
        low = self._get(w, ops[1]) & ((U32(1) << bits) - U32(1))
        sign = U32(0) if "U32" in ins.opcode else low >> (bits - U32(1)) << bits
        self._put(w, ops[0], (low - sign).astype(U32), mask)

    def _do_imnmx(self, w, ins, ops, mask):
        a, b = self._get(w, ops[1]), self._get(w, ops[2])
        if "U32" not in ins.opcode:
            a, b = a.view(I32), b.view(I32)
        v = np.where(self._predicate(w, ops[3]), np.minimum(a, b), np.maximum(a, b))
        self._put(w, ops[0], v.astype(I64).astype(U64).astype(U32) if v.dtype == I32 else v, mask)

    def _do_iabs(self, w, ins, ops, mask):
        self._put(w, ops[0], np.abs(self._get(w, ops[1]).view(I32).astype(I64)).astype(U32), mask)

    def _do_popc(self, w, ins, ops, mask):
        self._put(w, ops[0], np.array([int(x).bit_count() for x in self._get(w, ops[1])], dtype=U32), mask)

    def _do_isetp(self, w, ins, ops, mask):
        parts = ins.opcode.split(".")
        a, b = self._get(w, ops[2]), self._get(w, ops[3])
        if "U32" not in parts:
            a, b = a.view(I32), b.view(I32)
        r = _CMP[parts[1]](a, b)
        if "EX" in parts:       # continues a 64-bit comparison of the low words, in the last operand
            low = self._predicate(w, ops[5])
            r = np.where(a == b, low, _CMP[parts[1].replace("E", "") if parts[1] in ("GE", "LE") else parts[1]](a, b)) \
                if parts[1] not in ("EQ", "NE") else (r & low if parts[1] == "EQ" else r | low)
        self._combine(w, parts, ops, r, mask)

    def _combine(self, w, parts, ops, r, mask):
        c = self._predicate(w, ops[4])
        out = r | c if "OR" in parts else (r ^ c if "XOR" in parts else r & c)
        other = ~r | c if "OR" in parts else ~r & c
        self._put_pred(w, ops[0], out, mask)
        self._put_pred(w, ops[1], other, mask)

    def _do_p2r(self, w, ins, ops, mask):
        bits = sum((w.p[k].astype(U32) << U32(k)) for k in range(7))
        keep = int(ops[-1], 16)
        base = self._get(w, ops[2]) if len(ops) > 3 else np.zeros(32, dtype=U32)
        shift = {"B1": 8, "B2": 16, "B3": 24}.get(ins.opcode.split(".")[-1], 0)
        v = (base & U32(0xFFFFFFFF ^ (keep << shift & 0xFFFFFFFF))) | (bits & U32(keep)) << U32(shift)
        self._put(w, ops[0], v, mask)

    def _do_r2p(self, w, ins, ops, mask):
        text, shift = ops[1], 0
        for n in (1, 2, 3):
            if f".B{n}" in text:
                text, shift = text.replace(f".B{n}", ""), 8 * n
        v, keep = self._get(w, text) >> U32(shift), int(ops[2], 16)
        for k in range(7):
            if keep >> k & 1:
                w.p[k] = np.where(mask, (v >> U32(k)) & U32(1) != 0, w.p[k])

    # -- float -------------------------------------------------------------------------------
    def _do_fadd(self, w, ins, ops, mask):
        self._put(w, ops[0], (self._get(w, ops[1], "float") + self._get(w, ops[2], "float")).astype(F32), mask)

    def _do_fmul(self, w, ins, ops, mask):
        self._put(w, ops[0], (self._get(w, ops[1], "float") * self._get(w, ops[2], "float")).astype(F32), mask)

    def _do_ffma(self, w, ins, ops, mask):
        a, b, c = (self._get(w, o, "float").astype(np.float64) for o in ops[1:4])
        self._put(w, ops[0], (a * b + c).astype(F32), mask)

    _do_fsel = _do_sel
    _do_fadd32i, _do_fmul32i, _do_ffma32i = _do_fadd, _do_fmul, _do_ffma

    def _do_fmnmx(self, w, ins, ops, mask):
        a, b = self._get(w, ops[1], "float"), self._get(w, ops[2], "float")
        self._put(w, ops[0], np.where(self._predicate(w, ops[3]), np.fmin(a, b), np.fmax(a, b)).astype(F32), mask)

    def _do_fsetp(self, w, ins, ops, mask):
        parts = ins.opcode.split(".")
        a, b = self._get(w, ops[2], "float"), self._get(w, ops[3], "float")
        name = parts[1]
        nan = np.isnan(a) | np.isnan(b)
        if name in ("NUM", "NAN"):
            r = nan if name == "NAN" else ~nan
        else:
            unordered = name.endswith("U")
            r = _CMP[name[:2]](a, b)
            r = (r | nan) if unordered else (r & ~nan)
        self._combine(w, parts, ops, r, mask)

    def _do_mufu(self, w, ins, ops, mask):
        x = self._get(w, ops[1], "float").astype(np.float64)
        f = {"EX2": np.exp2, "LG2": np.log2, "RCP": lambda v: 1 / v, "RSQ": lambda v: 1 / np.sqrt(v),
             "SQRT": np.sqrt}[ins.opcode.split(".")[1]]
        self._put(w, ops[0], f(x).astype(F32), mask)

    def _half(self, w, tok):
        """A half operand's low or high half as float32 (or a float32 one)."""
        text = tok.replace("-", "").replace("|", "")
        sign = -1 if tok.startswith("-") else 1
        part = ""
        if "." in text and not text[0].isdigit():
            text, part = text.split(".", 1)
        if not _REG.match(text):
            return np.zeros(32, dtype=F32)
        v = self._get(w, text)
        if part == "F32":
            return sign * v.view(F32)
        half = (v >> U32(16) if part == "H1_H1" else v & U32(0xFFFF)).astype(np.uint16).view(np.float16)
        return sign * half.astype(F32)

    def _do_hadd2(self, w, ins, ops, mask):
        a, b = self._half(w, ops[1]), self._half(w, ops[2])
        s = a + b
        if ".F32" in ins.opcode:
            self._put(w, ops[0], s.astype(F32), mask)
        else:
            h = s.astype(np.float16).view(np.uint16).astype(U32)
            self._put(w, ops[0], h | h << U32(16), mask)

    def _do_hmul2(self, w, ins, ops, mask):     # both halves of registers
        low, high = ((self._half(w, ops[1] + part) * self._half(w, ops[2] + part)).astype(np.float16)
                     .view(np.uint16).astype(U32) for part in (".H0_H0", ".H1_H1"))
        self._put(w, ops[0], low | high << U32(16), mask)

    def _do_f2f(self, w, ins, ops, mask):
        if ".F16.F32" in ins.opcode:
            v = self._get(w, ops[1], "float").astype(np.float16).view(np.uint16).astype(U32)
            self._put(w, ops[0], v, mask)
        else:
            self._put(w, ops[0], self._half(w, ops[1]).astype(F32), mask)

    def _do_i2f(self, w, ins, ops, mask):
        v = self._get(w, ops[1])
        self._put(w, ops[0], (v if "U32" in ins.opcode else v.view(I32)).astype(F32), mask)

    def _do_f2i(self, w, ins, ops, mask):
        v = np.nan_to_num(self._get(w, ops[1], "float").astype(np.float64))
        v = np.trunc(v) if "TRUNC" in ins.opcode else np.rint(v)
        lo, hi = (0, 2 ** 32 - 1) if "U32" in ins.opcode else (-2 ** 31, 2 ** 31 - 1)
        self._put(w, ops[0], (np.clip(v, lo, hi).astype(I64) & 0xFFFFFFFF).astype(U32), mask)

    def _do_hmma(self, w, ins, ops, mask):
        i = self._reg(ops[0])
        for k in range(2):
            if i + k < 255:
                w.r[i + k] = np.where(mask, 0, w.r[i + k])

    # -- across lanes ------------------------------------------------------------------------
    def _do_shfl(self, w, ins, ops, mask):
        regs = ops[1:] if _PRED.match(ops[0]) else ops
        src, sel = self._get(w, regs[1]), self._get(w, regs[2]).astype(I64)
        own = np.arange(32)
        mode = ins.opcode.split(".")[1]
        pick = {"IDX": sel & 31, "BFLY": own ^ (sel & 31), "UP": np.maximum(own - sel, 0),
                "DOWN": np.minimum(own + sel, 31)}[mode]
        self._put(w, regs[0], src[pick], mask)

    def _do_vote(self, w, ins, ops, mask):
        preds = [o for o in ops if _PRED.match(o)]
        v = self._predicate(w, preds[-1])[mask]
        result = v.any() if "ANY" in ins.opcode else v.all()
        regs = [o for o in ops if _REG.match(o)]
        if regs:
            bits = sum(1 << k for k in np.nonzero(self._predicate(w, preds[-1]) & mask)[0])
            self._put(w, regs[0], np.full(32, bits, dtype=U32), mask)
        if len(preds) > 1:
            self._put_pred(w, preds[0], np.full(32, result), mask)

    # -- memory ------------------------------------------------------------------------------
    def _words(self, opcode):
        return max(1, isa.access_bytes(opcode) // 4)

    def _count(self, ins, addr, mask):
        n = wavefronts(addr, mask, isa.access_bytes(ins.opcode), ins.stem == "ATOMS")
        seen = self.wave[ins.addr]
        seen[0] += n
        seen[1] += self._words(ins.opcode)

    def _do_lds(self, w, ins, ops, mask):
        self._is_global = False
        addr = self._address(w, ops[1]) & 0xFFFFFFFF
        self._count(ins, addr, mask)
        self._load(w, ops[0], ins.opcode, addr, mask, self._shared_word)

    def _do_sts(self, w, ins, ops, mask):
        self._is_global = False
        addr = self._address(w, ops[0]) & 0xFFFFFFFF
        self._count(ins, addr, mask)
        i = self._reg(ops[1])
        for k in range(self._words(ins.opcode)):
            for lane in np.nonzero(mask)[0]:
                self._store_shared(int(addr[lane]) + 4 * k, int(w.r[i + k if i < 255 else 255][lane]))

    def _shared_word(self, address):
        at = (address & 0xFFFFFF) >> 2
        return self.shared[at] if at < len(self.shared) else 0

    def _store_shared(self, address, value):
        at = (address & 0xFFFFFF) >> 2
        if at < len(self.shared):
            self.shared[at] = value

    def _global_word(self, address):
        return self._shared_word(address) if address >= SHARED_BASE else self.memory.word(address)

    def _load(self, w, tok, opcode, addr, mask, word):
        i = self._reg(tok)
        if i == 255:
            return
        size = isa.access_bytes(opcode)
        for k in range(max(1, size // 4)):
            row = w.r[i + k].copy()
            for lane in np.nonzero(mask)[0]:
                a = int(addr[lane]) + 4 * k
                v = int(word(a & ~3)) >> (8 * (a & 3))
                row[lane] = v & (0xFF if size == 1 else 0xFFFF if size == 2 else 0xFFFFFFFF)
            w.r[i + k] = row

    def _do_ldg(self, w, ins, ops, mask):
        self._is_global = True
        tok = next(o for o in ops if o.startswith("["))
        self._load(w, ops[0], ins.opcode, self._address(w, tok), mask, self._global_word)

    _do_ld = _do_ldg

    def _do_stg(self, w, ins, ops, mask):
        pass                       # results of the block: nothing here reads them back

    _do_st = _do_red = _do_stg

    def _do_ldc(self, w, ins, ops, mask):
        m = re.match(r"^c\[0x([0-9a-f]+)\]\[(R\d+|RZ)?\+?(-?0x[0-9a-f]+)?\]$", ops[1])
        base = self._get(w, m.group(2)) if m and m.group(2) else np.zeros(32, dtype=U32)
        off = int(m.group(3), 16) if m and m.group(3) else 0
        v = np.array([self._constant(int(m.group(1), 16), int(b) + off) for b in base], dtype=U32)
        self._put(w, ops[0], v, mask)

    def _do_ldl(self, w, ins, ops, mask):
        self._is_global = False
        base, i = int(self._address(w, ops[1])[0]), self._reg(ops[0])
        for k in range(self._words(ins.opcode)):
            v = w.local.get(base + 4 * k, np.zeros(32, dtype=U32))
            w.r[i + k] = np.where(mask, v, w.r[i + k])

    def _do_stl(self, w, ins, ops, mask):
        self._is_global = False
        base, i = int(self._address(w, ops[0])[0]), self._reg(ops[1])
        for k in range(self._words(ins.opcode)):
            old = w.local.get(base + 4 * k, np.zeros(32, dtype=U32))
            w.local[base + 4 * k] = np.where(mask, w.r[i + k if i < 255 else 255], old)

    def conflict_factors(self):
        """{address: wavefronts over the fewest possible} of every shared access that ran."""
        return {a: n / words for a, (n, words) in self.wave.items() if words}
