"""The interpreter's arithmetic on single and half precision: a part of execute.Block."""
import re

import numpy as np

U32, I32, I64, F32 = np.uint32, np.int32, np.int64, np.float32
REG = re.compile(r"^(-)?(~)?(\|)?(R\d+|RZ)(\.[A-Z0-9_.]+)?\|?$")
CMP = {"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal}


class Floats:
    def _do_fadd(self, w, ins, ops, mask):
        self._put(w, ops[0], (self._get(w, ops[1], "float") + self._get(w, ops[2], "float")).astype(F32), mask)

    def _do_fmul(self, w, ins, ops, mask):
        self._put(w, ops[0], (self._get(w, ops[1], "float") * self._get(w, ops[2], "float")).astype(F32), mask)

    def _do_ffma(self, w, ins, ops, mask):
        a, b, c = (self._get(w, o, "float").astype(np.float64) for o in ops[1:4])
        self._put(w, ops[0], (a * b + c).astype(F32), mask)

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
            r = CMP[name[:2]](a, b)
            r = (r | nan) if unordered else (r & ~nan)
        self._combine(w, parts, ops, r, mask)

    def _do_fchk(self, w, ins, ops, mask):      # no division needs more than its few instructions
        self._put_pred(w, ops[0], np.zeros(32, dtype=bool), mask)

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
        if not REG.match(text):
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
