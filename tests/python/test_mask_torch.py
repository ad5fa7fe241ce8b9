"""Masks by description in torch and JAX: outputs and gradients are those of the array that the mask stands for."""
import dataclasses
import weakref

import numpy as np
import oracle
import pytest
from conftest import close
from test_mask_calls import KEYS, KINDS, ROWS, B, H, arrays

torch = pytest.importorskip("torch")
import attnd  # noqa: E402
import attnd.masks as m  # noqa: E402
from attnd import _operator_options  # noqa: E402


@pytest.fixture
def remote(client):
    import attnd.torch
    attnd.torch.connect(client)
    return attnd.torch


def tensors(rng, **sizes):
    return [torch.from_numpy(x).requires_grad_() for x in arrays(rng, **sizes)[:3]]


def agree(got, q, k, v, dense):
    """Output and gradients, with PyTorch's for the array."""
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(dense), enable_gqa=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got.square().sum(), (q, k, v)),
                    torch.autograd.grad(expected.square().sum(), (q, k, v))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["window", "blocks", "entries", "everything"])
def test_torch_takes_masks(remote, rng, name):
    mask, (q, k, v) = KINDS[name], tensors(rng)
    dense = mask.to_dense(B, H, ROWS, KEYS, align=0)
    agree(remote.attention(q, k, v, mask=mask, align="top_left"), q, k, v, dense)
    agree(remote.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), q, k, v, dense)
    with remote.replace():
        agree(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), q, k, v, dense)
    agree(remote.flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dense)


def test_compiled_checkpointed_and_freed_masks(remote, rng):
    q, k, v = tensors(rng)
    dense = (m.window(9, 0) | m.prefix(5)).to_dense(B, H, ROWS, KEYS, align=0)

    def attend(q, k, v):  # a mask that nothing else holds
        return remote.attention(q, k, v, mask=m.window(9, 0) | m.prefix(5), align="top_left")
    agree(attend(q, k, v), q, k, v, dense)
    agree(torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False), q, k, v, dense)
    mask = m.window(9, 0) | m.prefix(5)
    compiled = torch.compile(lambda q, k, v: remote.attention(q, k, v, mask=mask, align="top_left"), backend="aot_eager",
                             fullgraph=True)
    agree(compiled(q, k, v), q, k, v, dense)


def test_torch_says_what_is_wrong(remote, rng):
    q, k, v = tensors(rng)
    with pytest.raises(attnd.InvalidArgument, match="^attn_mask per_head: expected 1 or 4.*got 3"):
        remote.scaled_dot_product_attention(q, k, v, m.per_head([m.causal(), m.all_(), m.window(1, 1)]), enable_gqa=True)
    with pytest.raises(attnd.InvalidArgument, match="attn_mask: expected None when is_causal=True"):
        remote.scaled_dot_product_attention(q, k, v, m.all_(), is_causal=True, enable_gqa=True)


def test_bool_tensors_of_blocks_travel_as_blocks(remote, client, rng, monkeypatch):
    """And once: the second call names the list."""
    calls, forward = [], type(client).forward

    def noted(self, *arrays, **options):
        calls.append(options.get("mask"))
        return forward(self, *arrays, **options)
    monkeypatch.setattr(type(client), "forward", noted)
    q, k, v = tensors(rng, batch=1, heads=1, kv_heads=1, rows=1100, keys=1100)
    layout = rng.random((18, 18)) < 0.1
    dense = np.kron(layout, np.ones((64, 64), bool))[None, None, :1100, :1100]
    for n in range(2):
        agree(remote.scaled_dot_product_attention(q, k, v, torch.from_numpy(dense)), q, k, v, dense)
    assert all(isinstance(mask, m.Mask) for mask in calls) and len(calls) == 2
    np.testing.assert_array_equal(calls[0].to_dense(1, 1, 1100, 1100), dense)
    noise = rng.random((1, 1, 1100, 1100)) < 0.5
    agree(remote.scaled_dot_product_attention(q, k, v, torch.from_numpy(noise)), q, k, v, noise)
    assert not isinstance(calls[-1], m.Mask)


def test_the_cuda_engine_takes_masks(remote, gpu_daemon, rng):
    attnd.torch.connect(gpu_daemon.address, name="gpu", precision="f16", timeout=300)
    q, k, v = [x.detach() for x in tensors(rng, batch=1, heads=1, kv_heads=1, rows=512, keys=512)]
    blocks = np.kron(rng.random((8, 8)) < 0.2, np.ones((64, 64), bool))
    try:
        for got in (remote.scaled_dot_product_attention(q, k, v, torch.from_numpy(blocks), server="gpu"),
                    remote.attention(q, k, v, mask=m.blocks(blocks[::64, ::64], 64), server="gpu")):
            close(got, oracle.forward(q, k, v, mask=blocks).out, "f16", scale=4)
    finally:
        remote.disconnect("gpu")


@pytest.mark.parametrize("has_others", [True, False])
def test_engines_that_refuse_a_mask_get_arrays(remote, rng, monkeypatch, has_others):
    """Where a mask comes from a bool tensor; a mask that was asked for by its name is refused. A daemon that has no masks
    is asked once, one that refuses this mask each time, since another may do."""
    forward, info, calls = attnd.Client.forward, attnd.Client.info, []

    def features(client, index=0):
        found = info(client, index)
        assert "masks" in found.features
        return found if has_others else dataclasses.replace(found, features=["bool_mask"])

    def without_masks(client, *arguments, mask=None, **options):
        calls.append(mask)
        if isinstance(mask, m.Mask):
            raise attnd.Unimplemented("problem.mask: unsupported", reason="MASK_UNSUPPORTED")
        return forward(client, *arguments, mask=mask, **options)
    monkeypatch.setattr(attnd.Client, "forward", without_masks)
    monkeypatch.setattr(attnd.Client, "info", features)
    monkeypatch.setattr(_operator_options, "_without", weakref.WeakSet())
    q, k, v = [x.detach() for x in tensors(rng, batch=1, heads=1, kv_heads=1, rows=512, keys=512)]
    blocks = np.kron(rng.random((8, 8)) < 0.2, np.ones((64, 64), bool))
    for _ in range(2):
        got = remote.scaled_dot_product_attention(q, k, v, torch.from_numpy(blocks))
        close(got, oracle.forward(q, k, v, mask=blocks).out, "f32", scale=4)
    assert [isinstance(mask, m.Mask) for mask in calls] == ([True, False] * 2 if has_others else [True, False, False])
    with pytest.raises(attnd.Unimplemented) as caught:
        remote.attention(q, k, v, mask=m.blocks(blocks[::64, ::64], 64))
    assert caught.value.reason == "MASK_UNSUPPORTED"


# ---- JAX.

def test_jax_takes_masks(client, rng):
    jax = pytest.importorskip("jax")
    import attnd.jax
    attnd.jax.connect(client)
    q, k, v = [jax.numpy.asarray(x.swapaxes(1, 2)) for x in arrays(rng)[:3]]
    mask = KINDS["everything"]
    dense = jax.numpy.asarray(mask.to_dense(B, H, ROWS, KEYS, align=0))

    def loss(attend, mask, q, k, v):
        return (attend(q, k, v, mask=mask, query_seq_lengths=jax.numpy.array([ROWS, 40])) ** 2).sum()
    for wrap in (lambda f: f, jax.jit):
        got = wrap(jax.value_and_grad(lambda *a: loss(attnd.jax.dot_product_attention, mask, *a), (0, 1, 2)))(q, k, v)
        want = jax.value_and_grad(lambda *a: loss(attnd.jax.dot_product_attention, dense, *a), (0, 1, 2))(q, k, v)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
        for a, b in zip(got[1], want[1]):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
