"""A sliding window inside documents: draws the mask, checks that it is right, and computes with it on a daemon.

    python3 examples/draw_masks.py [PICTURE.png]   (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)

The picture needs matplotlib.
"""
import sys

import numpy as np

import attnd
import attnd.masks as m

ends = [0, 60, 140, 256]  # three documents: tokens 0 to 59, 60 to 139, 140 to 255
mask = m.window(31, 0) & m.documents(ends)  # a token sees itself and up to 31 tokens before it, in its own document

dense = mask.to_dense(1, 1, 256, 256)[0, 0]
document = np.searchsorted(ends, np.arange(256), side="right")
row, key = np.arange(256)[:, None], np.arange(256)[None, :]
assert np.array_equal(dense, (key <= row) & (row - key <= 31) & (document[row] == document[key]))

random = np.random.default_rng(1)
q, k, v = [random.standard_normal((1, 4, 256, 64)).astype(np.float32) for _ in range(3)]
with attnd.connect(precision="auto") as client:
    described = client.forward(q, k, v, mask=mask)
    as_array = client.forward(q, k, v, mask=dense)
    report = client.compile_mask(mask, rows=256, q_heads=4)
print(f"{report.nnz} of {256 * 256} scores are visible; the daemon holds {report.bytes_held} bytes of the mask")
print("largest difference from the same mask as an array:", np.abs(described.out - as_array.out).max())
np.testing.assert_allclose(described.out, as_array.out, atol=2e-3)

if len(sys.argv) > 1:
    mask.show(256).figure.savefig(sys.argv[1])
