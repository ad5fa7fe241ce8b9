"""The Triton kernel that volta_triton times gives attention's numbers: in Triton's interpreter, on the CPU.

Skipped where `./dev volta-report --triton` has not installed Triton 2.3.0. Products are in float16 there.
"""
import importlib.util
import os
import pathlib
import sys
import types
import unittest

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)] + [str(d) for d in [HERE.parents[1] / ".deps/triton_volta"] if d.exists()]
import volta_masks  # noqa: E402

LENGTH, BLOCKS = 4096, 3        # of queries; whole blocks of them that are computed


class Array:
    """A NumPy array, as the interpreter takes a tensor."""
    device = "cpu"

    def __init__(self, values):
        self.values, self.dtype = values, values.dtype

    def data_ptr(self):
        return self.values.ctypes.data

    def cpu(self):
        return self

    def to(self, _):
        return self

    def copy_(self, _):
        pass


def lists(mask, rows, keys):
    """[where each block's list of whole tiles begins, the lists; the same of partial ones]."""
    some, every = volta_masks.tiles(mask, rows, keys)
    return [Array(np.array(a, np.int32)) for of in (every, some & ~every)
            for a in (np.append(0, of.sum(1).cumsum()), np.nonzero(of)[1])]


def table(mask, size):
    """Which blocks a mask shows whole."""
    return Array(volta_masks.tiles(mask, size, size)[1].astype(np.int32))


@unittest.skipUnless(importlib.util.find_spec("triton"), "no Triton")
class TritonMasks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.environ["TRITON_INTERPRET"] = "1"
        import triton_cubin
        triton_cubin.stub_torch()
        from triton.runtime import interpreter
        interpreter.builder.options = types.SimpleNamespace(allow_fp8e4nv=False, max_num_imprecise_acc_default=0)
        import triton_masks
        import volta_triton
        cls.forward, cls.triton, cls.families = triton_masks.forward, volta_triton, volta_masks.families(LENGTH)

    def check(self, head_dim, setting, name):
        rows, keys = setting[:2]
        mask, (rule, size) = self.families[name], self.triton.rules()[name]
        generator = np.random.default_rng(1)
        q, k, v = (generator.standard_normal((LENGTH, head_dim)).astype(np.float16) for _ in range(3))
        o, lse = np.full_like(q, np.nan), np.full(LENGTH, np.nan, np.float32)
        scale = head_dim ** -0.5
        self.forward[(BLOCKS, 1)](*map(Array, (q, k, v, o, lse)), *lists(mask, rows, keys), table(mask, size), LENGTH,
                                  scale * np.log2(np.e), RULE=rule, SIZE=size, D=head_dim, BLOCK_M=rows, BLOCK_N=keys)
        end = BLOCKS * rows
        s = np.where(mask[:end], q[:end].astype(float) @ k.astype(float).T * scale, -np.inf)
        top = s.max(1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(1, keepdims=True)
        np.testing.assert_allclose(o[:end], p / total @ v.astype(float), atol=4e-3)
        np.testing.assert_allclose(lse[:end], (top + np.log(total))[:, 0], atol=4e-3)
        self.assertTrue(np.isnan(lse[end:]).all())

    def test_each_mask_is_what_it_is_called(self):
        for name in self.triton.rules():
            with self.subTest(mask=name):
                self.check(64, self.triton.SETTINGS[64][0], name)

    def test_wide_heads(self):
        self.check(128, self.triton.SETTINGS[128][0], "causal")


if __name__ == "__main__":
    unittest.main()
