"""Attention of NumPy arrays on a daemon, forward and backward, checked against NumPy.

    python3 examples/numpy_attention.py        (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)
"""
import numpy as np

import attnd

random = np.random.default_rng(1)
q, k, v, dout = [random.standard_normal((2, 4, 256, 64)).astype(np.float32) for _ in range(4)]  # batch, heads, length, dim

with attnd.connect(precision="auto") as client:
    forward = client.forward(q, k, v, causal="top_left", keep=True)  # the daemon keeps what backward needs
    backward = client.backward(dout, forward)
    print(f"{forward.receipt.kernel} on {forward.receipt.device}: {1e3 * forward.receipt.elapsed:.1f} ms")

scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
scores[..., ~np.tri(256, dtype=bool)] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)

print("largest error of the result:", np.abs(forward.out - weights @ v).max())
print("largest error of dV:", np.abs(backward.dv - weights.swapaxes(-1, -2) @ dout).max())
np.testing.assert_allclose(forward.out, weights @ v, atol=5e-3)  # 16 bits where the daemon has no float32
np.testing.assert_allclose(backward.dv, weights.swapaxes(-1, -2) @ dout, atol=2e-2)
