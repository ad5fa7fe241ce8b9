"""Bytes that a training step moves, by the daemon's own counters: a stack of layers, its layers one by one, and its
attention alone, with residual leases and without. The whole figures: ATTND_TEST_TOKENS=16384 (Llama: 4096)."""
import os

import numpy as np
import pytest

import attnd
from attnd.modules import Heads, Layout, Rotary

TOKENS = int(os.environ.get("ATTND_TEST_TOKENS", "512"))


def encoder(block, width, heads, pre_norm):
    """BERT's layer, or GPT-2's."""
    def norm(value, name):
        return block.norm(value, "layer", block.parameter(f"{name}.weight", width), block.parameter(f"{name}.bias", width))

    def linear(value, name, inner, outer):
        return block.linear(value, block.parameter(f"{name}.weight", outer, inner), block.parameter(f"{name}.bias", outer))

    def attention(value):
        packed = linear(value, "in", width, 3 * width)
        q, k, v = [Heads(packed, heads, width // heads, part * width) for part in range(3)]
        return linear(block.attention(q, k, v, causal=pre_norm), "out", width, width)

    def feed_forward(value):
        return linear(block.activation(linear(value, "up", width, 4 * width), "gelu"), "down", 4 * width, width)
    value = 0
    for name, inner in (("norm1", attention), ("norm2", feed_forward)):
        value = block.add(value, inner(norm(value, name))) if pre_norm else norm(block.add(value, inner(value)), name)


def llama(block, width, heads, kv_heads, inner):
    def norm(value, name):
        return block.norm(value, "rms", block.parameter(name, width))

    def linear(value, name, rows, columns):
        return block.linear(value, block.parameter(name, rows, columns))
    dim, normed = width // heads, norm(0, "norm1")
    q, k, v = [Heads(linear(normed, name, count * dim, width), count, dim)
               for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))]
    rotary = Rotary(tuple(float(10000 ** -(n / dim)) for n in range(0, dim, 2)))
    attended = block.add(0, linear(block.attention(q, k, v, causal=True, rotary=rotary), "o", width, width))
    normed = norm(attended, "norm2")
    gate = block.activation(linear(normed, "gate", inner, width), "silu")
    block.add(attended, linear(block.multiply(gate, linear(normed, "up", inner, width)), "down", width, inner))


# Layers, width, heads, KV heads, length; what makes a layer.
MODELS = {
    "BERT-base": (12, 768, 12, 12, 512, lambda block: encoder(block, 768, 12, False)),
    "GPT-2 small": (12, 768, 12, 12, 1024, lambda block: encoder(block, 768, 12, True)),
    "Llama 1B": (16, 2048, 32, 8, 4096, lambda block: llama(block, 2048, 32, 8, 8192)),
}


class Moved:
    """Bytes that a daemon received and sent while something ran."""

    def __init__(self, daemon):
        self._daemon = daemon

    def __call__(self, run):
        run()  # once before, for what is made at first
        before = self._count()
        run()
        return self._count() - before

    def _count(self):
        return self._daemon.metric("attnd_received_bytes_total") + self._daemon.metric("attnd_sent_bytes_total")


def stack(make, width, layers):
    layout = Layout(width, "f16")
    block = layout.block()
    make(block)
    for n in range(layers):
        layout.layer(block, f"{n}.")
    return layout


def module_step(client, make, width, layers, x, name):
    module = attnd.register(stack(make, width, layers), client, name=name, optimizer=attnd.SGD(), max_rows=x[..., 0].size)
    module.put({p.name: np.full(p.shape, 1e-3, np.float32) for p in module.layout.parameters})

    def run():
        module.backward(x, module.forward(x, keep=True)[1])
        module.step(lr=1e-3)
    return module, run


@pytest.mark.parametrize("name", ["BERT-base", "GPT-2 small", pytest.param("Llama 1B", marks=pytest.mark.rare("modules"))])
def test_a_step_moves_four_tensors(name):
    from conftest import Daemon
    count, width, heads, kv_heads, length, make = MODELS[name]
    tokens = min(TOKENS, 4096) if width > 1024 else TOKENS
    length = min(length, tokens)
    daemon = Daemon("--memory_limit_mib", "4096", "--module_memory_mib", "8192")
    try:
        moved = Moved(daemon)
        with attnd.connect(daemon.address, timeout=600) as client:
            x = np.ones((tokens // length, length, width), np.float16)
            found = {}
            for what, layers in (("stack", 2), ("layer", 1)):
                module, run = module_step(client, make, width, layers, x, what)
                found[what] = moved(run)
                module.release()
            q, k, v = [np.ones((x.shape[0], n, length, width // heads), np.float16) for n in (heads, kv_heads, kv_heads)]
            for what, keep in (("stateless", False), ("leased", True)):
                def attend():
                    result = client.forward(q, k, v, causal="top_left", keep=keep)
                    client.backward(q, result)
                    assert (result.residual is not None) == keep
                found[what] = moved(attend)
    finally:
        daemon.stop()
    least = 4 * tokens * width * 2
    calls = {what: count * found[what] for what in ("stateless", "leased", "layer")}
    print(f"{name}, {tokens} tokens a step, MB: attention alone {calls['stateless'] / 1e6:.1f}, with leases "
          f"{calls['leased'] / 1e6:.1f}; layers {calls['layer'] / 1e6:.1f} ({calls['layer'] / calls['stateless'] - 1:.1%}); "
          f"a stack {found['stack'] / 1e6:.2f} ({found['stack'] / calls['leased'] - 1:.1%} of leases, 4 tensors "
          f"{found['stack'] / least - 1:+.2%})")
    assert found["stack"] <= 1.01 * least
    assert found["stack"] <= 0.05 * calls["leased"]
    # Grouped heads make attention's own tensors fewer.
    assert calls["layer"] <= 0.34 * calls["stateless"] or kv_heads < heads
