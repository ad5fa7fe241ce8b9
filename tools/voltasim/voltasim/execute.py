"""Run a kernel's machine code on chosen warps of one block, to learn the path each takes.

An interpreter of sm_70 SASS: integer, predicate, float and half conversions, shuffles and votes
inside a warp, shared memory, barriers, and global memory as far as it was filled in (unmapped
addresses read as 0). Tensor-core results are 0: fill tensors with nothing and every product is
exact. Lanes may diverge (the lowest program counter runs first).

A path entry is an instruction index i; i + n means predicated off (n instructions in all), and
i + n·(2 + b) a barrier whose number b came from a register. Also counts the wavefronts of every
shared access, and the bytes that each global access moves.
"""
import re
from collections import defaultdict

import numpy as np

from . import isa
from .floats import CMP as _CMP, Floats, REG as _REG
from .lanes import wavefronts
from .memory import Memory, Traffic, Warp  # noqa: F401  (callers import Memory from here)
U32, I32, U64, I64, F32 = np.uint32, np.int32, np.uint64, np.int64, np.float32
_CONST = re.compile(r"^(-)?(~)?(\|)?c\[0x([0-9a-f]+)\]\[0x([0-9a-f]+)\](\.\w+)?\|?$")
_IMM = re.compile(r"^-?0x[0-9a-f]+$")
_ADDR = re.compile(r"^\[(R\d+|RZ)?(\.[A-Z0-9_.]+)?\+?(-?0x[0-9a-f]+)?\]$")
_PRED = re.compile(r"^!?P(\d|T)$")
SHARED_BASE = 1 << 40          # generic addresses of shared memory


class Block(Floats):
    """One block; `constants` maps offsets of constant bank 0 to 32-bit words.

    Global addresses below `l1_below` count as found in the L1: tables that all blocks read.
    """

    def __init__(self, listing, constants, memory, warps, shared_bytes, block_index=0, limit=4_000_000, l1_below=0):
        self.instrs = listing.instrs
        self.at = {i.addr: i.index for i in listing.instrs}
        self.constants, self.memory = constants, memory
        self.shared = np.zeros(shared_bytes // 4 + 64, dtype=U32)
        self.warps = [Warp(w) for w in warps]
        self.block_index, self.limit, self.l1_below = block_index, limit, l1_below
        self.wave = defaultdict(lambda: [0, 0])
        self.traffic = Traffic()
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

    def _do_brx(self, w, ins, ops, mask):       # behind itself, by a register and a number
        register, behind = ops[0].split()[:2]
        target = self._get(w, register).view(I32).astype(I64) + ins.addr + 16 + int(behind, 16)
        for lane in np.nonzero(mask)[0]:
            w.pc[lane] = self.at[int(target[lane])]

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
    _do_dfma = _do_dadd = _do_dmul = _nothing      # no path depends on numbers of 64 bits

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
        src, _ = self._split(ops)
        lead = next(n for n in range(1, len(ops)) if not _PRED.match(ops[n]))
        extended = ".X" in ins.opcode
        total = np.zeros(32, dtype=U64)
        for o in src[1:4]:      # a negated operand of an .X addition is the complement: the borrow comes as carry
            is_negated = o.startswith("-") and not _IMM.match(o)
            total = total + ((~self._get(w, o[1:])).astype(U64) + U64(not extended) if is_negated
                             else self._get(w, o).astype(U64))
        if extended:
            for p in (o for o in ops[lead:] if _PRED.match(o)):
                total = total + self._predicate(w, p).astype(U64)
        for n, p in enumerate(ops[1:lead]):
            self._put_pred(w, p, total >> U64(32) > n, mask)
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

    _do_fsel = _do_sel

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

    def _do_flo(self, w, ins, ops, mask):       # the place of the first one from above
        self._put(w, ops[0], np.array([int(x).bit_length() - 1 & 0xFFFFFFFF for x in self._get(w, ops[1])], dtype=U32), mask)

    def _do_isetp(self, w, ins, ops, mask):
        parts = ins.opcode.split(".")
        a, b = self._get(w, ops[2]), self._get(w, ops[3])
        if "U32" not in parts:
            a, b = a.view(I32), b.view(I32)
        r = _CMP[parts[1]](a, b)
        if "EX" in parts:       # continues a 64-bit comparison of the low words, in the last operand
            low = self._predicate(w, ops[5])
            r = np.where(a == b, low, _CMP[parts[1].replace("E", "T")](a, b)) \
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

    def _global_address(self, w, ins, ops, mask, writes):
        self._is_global = True
        addr = self._address(w, next(o for o in ops if o.startswith("[")))
        self.traffic.add(ins.addr, {int(a) >> 5 for a in addr[mask] if self.l1_below <= a < SHARED_BASE}, writes)
        return addr

    def _do_ldg(self, w, ins, ops, mask):
        self._load(w, ops[0], ins.opcode, self._global_address(w, ins, ops, mask, False), mask, self._global_word)

    _do_ld = _do_ldg

    def _do_stg(self, w, ins, ops, mask):
        self._global_address(w, ins, ops, mask, True)    # results of the block: nothing here reads them back

    _do_st = _do_red = _do_stg

    def _do_atomg(self, w, ins, ops, mask):              # what stood there; nothing changes
        regs = [o for o in ops if _REG.match(o)]
        self._load(w, regs[0], "LDG", self._global_address(w, ins, ops, mask, True), mask, self._global_word)

    _do_atom = _do_atomg

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
