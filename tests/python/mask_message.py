"""Masks as protoc's own classes see them, score by score: the definitions of docs/MASKS.md on the MaskSpec message, in plain
Python. It shares no line with the package's evaluation or with the C++ library."""
import os
import subprocess
import sys

from conftest import ROOT


def generated(folder):
    """The module mask_pb2, made by protoc in `folder`."""
    subprocess.run(["protoc", "-I.", f"--python_out={folder}", "attnd/v1/mask.proto"], cwd=os.path.join(ROOT, "proto"),
                   check=True)
    sys.path.insert(0, os.path.join(folder, "attnd", "v1"))
    try:
        import mask_pb2
    finally:
        sys.path.pop(0)
    return mask_pb2


def numbers(array):
    if array.entry_bytes == 0:
        return list(array.value)
    width = array.entry_bytes
    return [int.from_bytes(array.data[n:n + width], "little") for n in range(0, len(array.data), width)]


def philox(counter, key):
    """Philox4x32 with ten rounds."""
    c = list(counter)
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


class Oracle:
    """The oracle of one problem; offsets: the diagonal's, of each batch entry."""

    def __init__(self, spec, batch, heads, offsets):
        self.spec, self.batch, self.heads, self.offsets = spec, batch, heads, offsets
        self.lists = {}

    def sees(self, b, h, i, j):
        of = list(self.spec.pattern_of)
        index = of[0] if len(of) == 1 else of[h] if len(of) == self.heads else of[b * self.heads + h]
        row, key = i + self.spec.origin.row_begin, j + self.spec.origin.key_begin
        return self.pattern(index, b, h, row, key)

    def query(self, b, row):
        return row - self.spec.origin.row_begin + self.offsets[b] + self.spec.origin.key_begin

    def list_of(self, message, name):
        found = self.lists.get((id(message), name))
        if found is None:
            field = getattr(message, name)
            found = numbers(field)
            self.lists[id(message), name] = found
            self.lists[id(message), name, "alive"] = message
        return found

    def pattern(self, index, b, h, row, key):
        pattern = self.spec.pattern[index]
        kind = pattern.WhichOneof("kind")
        at = getattr(pattern, kind)
        if kind == "expr":
            return self.expr(at, b, h, row, key)
        return getattr(self, kind)(self.kept(index, kind, at), b, h, row, key)

    def kept(self, index, kind, message):
        """One object for each pattern, so that list_of knows it again."""
        return self.lists.setdefault((index, kind), message)

    def expr(self, e, b, h, row, key):
        op, q = e.WhichOneof("op"), self.query(b, row)
        at = getattr(e, op)
        if op == "all":
            return True
        if op == "window":
            return (at.left == -1 or key >= q - at.left) and (at.right == -1 or key <= q + at.right)
        if op == "dilated":
            near = (at.left == -1 or key - q >= -at.left * at.step) and (at.right == -1 or key - q <= at.right * at.step)
            return (q - key) % at.step == 0 and near
        if op == "stride_rel":
            return (q - key) % at.p == at.phase
        if op == "stride_col":
            return at.lo <= key % at.p < at.hi
        if op == "block_window":
            shift = 0 if not at.shift else at.shift[b if len(at.shift) > 1 else 0]
            return at.lo <= (key + shift) // at.p - (q + shift) // at.p <= at.hi
        if op == "global":
            spans = list(zip(at.start, at.end))
            rows, columns = [any(start <= x < end for start, end in spans) for x in (q, key)]
            return {0: rows or columns, 1: rows, 2: columns}[at.direction]
        if op == "prefix":
            return key < at.len[b if len(at.len) > 1 else 0]
        if op == "segment":
            return any(begin <= q < end and begin <= key < end for begin, end in zip(at.cu, at.cu[1:]))
        return self.compound(op, at, b, h, row, key)

    def compound(self, op, at, b, h, row, key):
        if op == "all_of":
            return all(self.expr(one, b, h, row, key) for one in at.e)
        if op == "any_of":
            return any(self.expr(one, b, h, row, key) for one in at.e)
        if op == "negate":
            return not self.expr(at, b, h, row, key)
        if op == "pattern_ref":
            return self.pattern(at, b, h, row, key)
        if op == "groups":
            rows, keys = numbers(at.row), numbers(at.key)
            first = (b * self.spec.extents.rows, b * self.spec.extents.keys) if at.per_batch else (0, 0)
            return rows[first[0] + row] == keys[first[1] + key] != 0
        assert op == "random", op
        return key // at.block in self.drawn(at, b, h, row)

    def drawn(self, at, b, h, row):
        block_row = self.query(b, row) // at.block
        name = at.SerializeToString(), b, h, block_row
        if name not in self.lists:
            rows = [r for r in range(self.spec.extents.rows) if self.query(b, r) // at.block == block_row]
            left = [c for c in range(-(-self.spec.extents.keys // at.block)) if not at.HasField("exclude") or not all(
                self.expr(at.exclude, b, h, r, k) for r in rows
                for k in range(c * at.block, min((c + 1) * at.block, self.spec.extents.keys)))]
            count = min(at.per_row, len(left))
            for n in range(count):
                word = philox((n // 4, block_row % (1 << 32), h if at.per_head else 0, 0x6D61736B), at.seed)[n % 4]
                x = n + word * (len(left) - n) // (1 << 32)
                left[n], left[x] = left[x], left[n]
            self.lists[name] = left[:count]
        return self.lists[name]

    def blocks(self, at, b, h, row, key):
        starts, indices = self.list_of(at, "indptr"), self.list_of(at, "indices")
        bitmap_of = self.list_of(at, "bitmap_of")
        for n in range(starts[row // at.bq], starts[row // at.bq + 1]):
            if indices[n] == key // at.bk:
                if not at.kind or at.kind[n] == 0:
                    return True
                bit = bitmap_of[sum(at.kind[:n])] * ((at.bq * at.bk + 7) // 8) * 8 + row % at.bq * at.bk + key % at.bk
                return bool(at.bitmaps[bit // 8] >> bit % 8 & 1)
        return False

    def col_runs(self, at, b, h, row, key):
        start, end = self.list_of(at, "start"), self.list_of(at, "end")
        if any(start[n] <= row < end[n] for n in range(key * at.m, (key + 1) * at.m)):
            return False
        return self.expr(at.base, b, h, row, key) if at.HasField("base") else True

    def row_runs(self, at, b, h, row, key):
        first, stride, count = [self.list_of(at, name) for name in ("first", "stride", "count")]
        return any(key == first[n] + stride[n] * k for n in range(row * at.r, (row + 1) * at.r) for k in range(count[n]))

    def row_intervals(self, at, b, h, row, key):
        begin, end = self.list_of(at, "begin"), self.list_of(at, "end")
        return any(begin[n] <= key < end[n] for n in range(row * at.r, (row + 1) * at.r))

    def rectangles(self, at, b, h, row, key):
        for r in at.of:
            causal = r.key_end - key >= r.row_end - row
            inverse = key - r.key_begin >= row - r.row_begin
            if r.row_begin <= row < r.row_end and r.key_begin <= key < r.key_end:
                if {0: True, 1: causal, 2: inverse, 3: causal and inverse}[r.shape]:
                    return True
        return False

    def bits(self, at, b, h, row, key):
        bit = row * at.row_pitch_bits + key
        return bool(at.data[bit // 8] >> bit % 8 & 1)
