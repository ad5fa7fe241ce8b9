"""Gradient descent in JAX through attention on a daemon, inside jit.

    python3 examples/jax_attention.py          (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)
"""
import jax
import jax.numpy as jnp

import attnd.jax

attnd.jax.connect(wait_for_ready=True, timeout=120, precision="auto")
x = jax.random.normal(jax.random.key(1), (4, 32, 2, 16))  # batch, length, heads, dim
target = jnp.cumsum(x, axis=1) / jnp.arange(1, 33)[:, None, None]  # the mean of what came before
weights = {name: jax.random.normal(jax.random.key(n), (16, 16)) / 4 for n, name in enumerate(("q", "k", "v"))}


def loss(weights):
    q, k, v = [x @ weights[name] for name in ("q", "k", "v")]
    out = attnd.jax.dot_product_attention(q, k, v, is_causal=True)
    return jnp.mean((out - target) ** 2)


@jax.jit
def step(weights):
    value, gradients = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda weight, gradient: weight - 2.0 * gradient, weights, gradients)


for n in range(201):
    value, weights = step(weights)
    if n % 50 == 0:
        print(f"step {n}: loss {value:.4f}")
attnd.jax.check()  # raises the error of a call that failed inside jit
