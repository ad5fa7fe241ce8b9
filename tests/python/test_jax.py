"""attnd.jax.dot_product_attention against jax.nn.dot_product_attention: values, gradients, jit, vmap, errors."""
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnd  # noqa: E402
import attnd.jax as remote  # noqa: E402


@pytest.fixture(autouse=True)
def connected(client):
    remote.connect(client)


def tensors(rng, dtype=jnp.float32, kv_len=9):
    shapes = (2, 9, 4, 8), (2, kv_len, 2, 8), (2, kv_len, 2, 8)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


CASES = {
    "plain": lambda rng: {}, "causal": lambda rng: {"is_causal": True}, "scale": lambda rng: {"scale": 0.3},
    "window": lambda rng: {"local_window_size": (3, 1)}, "one window": lambda rng: {"local_window_size": 2},
    "bias": lambda rng: {"bias": jnp.asarray(rng.standard_normal((2, 1, 9, 9)), jnp.float32)},
    "mask": lambda rng: {"mask": jnp.asarray(rng.random((1, 4, 9, 9)) < 0.8).at[..., 0].set(True)},
    "lengths": lambda rng: {"key_value_seq_lengths": jnp.array([9, 4]), "query_seq_lengths": jnp.array([5, 9])},
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree_with_jax(name, rng):
    q, k, v = tensors(rng)
    options = CASES[name](rng)
    bias = options.pop("bias", None)
    weight = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def objective(function):
        return lambda q, k, v, bias: (function(q, k, v, bias, **options) * weight).sum()

    which = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    np.testing.assert_allclose(remote.dot_product_attention(q, k, v, bias, **options),
                               jax.nn.dot_product_attention(q, k, v, bias, **options), rtol=1e-4, atol=1e-5)
    got = jax.grad(objective(remote.dot_product_attention), which)(q, k, v, bias)
    expected = jax.grad(objective(jax.nn.dot_product_attention), which)(q, k, v, bias)
    for mine, theirs in zip(got, expected):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrong, field", [
    ({"key": jnp.zeros((2, 9, 2, 5))}, "key"), ({"value": jnp.zeros((2, 5, 2, 8))}, "value"),
    ({"query": jnp.zeros((2, 9, 4, 8), jnp.int32)}, "query"), ({"key": jnp.zeros((2, 9, 2, 8), jnp.bfloat16)}, "key"),
    ({"mask": jnp.ones((9, 9))}, "mask"), ({"bias": jnp.ones((3, 3))}, "bias"), ({"scale": "x"}, "scale"),
    ({"local_window_size": (1, 2, 3)}, "local_window_size"), ({"local_window_size": (-2, 1)}, "local_window_size left"),
    ({"local_window_size": (-1, 1)}, "local_window_size left"), ({"local_window_size": (2, -1)}, "local_window_size right"),
    ({"local_window_size": -1}, "local_window_size left"), ({"local_window_size": 1.5}, "local_window_size"),
    ({"key_value_seq_lengths": jnp.array([1])}, "key_value_seq_lengths"),
    ({"query_seq_lengths": jnp.array([1.0, 2.0])}, "query_seq_lengths"), ({"query_seq_lengths": "x"}, "query_seq_lengths"),
    ({"implementation": "flash"}, "implementation"), ({"is_causal": "no"}, "is_causal"),
    ({"return_residual": None}, "return_residual"), ({"mask": "x"}, "mask"), ({"bias": "x"}, "bias"),
    ({"query": "x"}, "query"), ({"value": None}, "value"), ({"mask": jnp.ones((1, 2, 4, 9, 9), bool)}, "mask"),
])
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_arguments_are_named_while_tracing(wrong, field, compiled, rng):
    q, k, v = tensors(rng)
    call = (lambda: remote.dot_product_attention(**{"query": q, "key": k, "value": v, **wrong}))
    with pytest.raises(attnd.InvalidArgument, match=rf"^{field}: expected (?!.*\b[qkv]\b).*, got ") as caught:
        jax.jit(call)() if compiled else call()
    assert caught.value.field == field


@pytest.mark.parametrize("wrong, field", [
    ({"key": jnp.zeros((0, 9, 2, 5))}, "key"), ({"value": jnp.zeros((0, 5, 2, 8))}, "value"),
    ({"key": jnp.zeros((0, 9, 3, 8))}, "value"), ({"key": jnp.zeros((0, 9, 2, 8), jnp.bfloat16)}, "key"),
    ({"key": jnp.zeros((2, 9, 2, 8))}, "key"), ({"mask": jnp.ones((3, 3), bool)}, "mask"),
    ({"scale": float("inf")}, "scale"), ({"local_window_size": (-2, 1)}, "local_window_size left"),
])
def test_wrong_arguments_are_named_where_there_is_nothing_to_compute(wrong, field):
    q, k = jnp.zeros((0, 9, 4, 8)), jnp.zeros((0, 9, 2, 8))
    with pytest.raises(attnd.InvalidArgument, match=rf"^{field}: expected ") as caught:
        remote.dot_product_attention(**{"query": q, "key": k, "value": k, **wrong})
    assert caught.value.field == field


def test_arguments_are_those_of_jax_and_longer_lengths_mean_everything(rng):
    import inspect
    ours, theirs = [inspect.signature(f.dot_product_attention).parameters for f in (remote, jax.nn)]
    assert not theirs.keys() - ours.keys()
    q, k, v = tensors(rng)
    got = remote.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([99, 4]), implementation="xla")
    expected = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([99, 4]), implementation="xla")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def composed(rng, batch, heads, rows, keys):
    """Options of every kind at once, each there or not, with shapes that broadcast in some way."""
    def shape():
        return tuple(np.where(rng.random(4) < 0.4, 1, (batch, heads, rows, keys)))

    windows = 3, (2, 1), (0, 4), (5, 0)
    every = {"mask": jnp.asarray(rng.random(shape()) < 0.8), "is_causal": True, "scale": float(rng.normal()),
             "bias": jnp.asarray(rng.standard_normal(shape()), jnp.float32),
             "local_window_size": windows[rng.integers(4)],
             "key_value_seq_lengths": jnp.asarray(rng.integers(0, keys + 1, batch), jnp.int32),
             "query_seq_lengths": jnp.asarray(rng.integers(0, rows + 1, batch), jnp.int32)}
    return {name: value for name, value in every.items() if rng.random() < 0.5}


def rows_that_see(options, batch, heads, rows, keys):
    row, key = np.arange(rows)[:, None], np.arange(keys)
    seen = np.broadcast_to(options.get("mask", True), (batch, heads, rows, keys)).copy()
    if "is_causal" in options:
        seen &= key <= row
    if "local_window_size" in options:
        left, right = np.broadcast_to(options["local_window_size"], 2)
        seen &= (key >= row - left) & (key <= row + right)
    for name, index in (("key_value_seq_lengths", key), ("query_seq_lengths", row)):
        if name in options:
            seen &= index < np.asarray(options[name])[:, None, None, None]
    return seen.any(-1).swapaxes(1, 2)[..., None]


@pytest.mark.parametrize("repeat", range(4))
def test_options_compose_as_in_jax_but_for_rows_that_see_nothing(repeat, rng):
    sizes = batch, heads, rows, keys = 2, 4, int(rng.integers(1, 12)), int(rng.integers(1, 12))
    options = composed(rng, *sizes)
    print(options)
    bias, sees = options.pop("bias", None), rows_that_see(options, *sizes)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32)
              for shape in ((batch, rows, heads, 8), (batch, keys, 2, 8), (batch, keys, 2, 8))]
    weight = sees * rng.standard_normal((batch, rows, heads, 8))

    def objective(function):
        def run(*inputs):
            out = function(*inputs, **options)
            return (out * weight).sum(), out
        return jax.value_and_grad(run, (0, 1, 2) if bias is None else (0, 1, 2, 3), has_aux=True)(*arrays, bias)

    (_, out), gradients = objective(remote.dot_product_attention)
    (_, expected), theirs = objective(jax.nn.dot_product_attention)
    np.testing.assert_allclose(out, np.where(sees, expected, 0), rtol=1e-4, atol=1e-5)
    for mine, other in zip(gradients, theirs):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4)


def test_one_batch_entry_may_lack_its_dimension_and_nothing_gives_nothing(rng):
    q, k, v = [x[:1] for x in tensors(rng)]
    expected = jax.nn.dot_product_attention(q, k, v)
    for arrays in ((q[0], k, v), (q, k[0], v[0]), (q[0], k[0], v)):
        got = remote.dot_product_attention(*arrays)
        assert got.shape == arrays[0].shape
        np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=1e-4, atol=1e-5)
    for arrays in ((q[:0], k[:0], v[:0]), (q[:, :0], k, v), (q, k[:, :0], v[:, :0])):
        out, residual = remote.dot_product_attention(*arrays, return_residual=True)
        assert out.shape == arrays[0].shape and residual.shape == out.shape[:-1] and not out.any()
        assert np.isneginf(residual).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sixteen_bit_elements(dtype, rng):
    q, k, v = tensors(rng, dtype)
    got = remote.dot_product_attention(q, k, v, is_causal=True)
    assert got.dtype == dtype
    expected = jax.nn.dot_product_attention(*[x.astype(jnp.float32) for x in (q, k, v)], is_causal=True)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.01, atol=0.01)


def test_residual_is_the_log_sum_exp_and_differentiable(rng):
    q, k, v = tensors(rng)

    def plain(q, k):
        scores = jnp.einsum("bqhd,bkhd->bqhk", q, jnp.repeat(k, 2, 2)) / np.sqrt(8)
        return jax.nn.logsumexp(scores, -1)

    out, lse = remote.dot_product_attention(q, k, v, return_residual=True)
    assert lse.shape == (2, 9, 4) and out.shape == q.shape
    np.testing.assert_allclose(lse, plain(q, k), rtol=1e-4, atol=1e-5)
    got = jax.grad(lambda q, k: remote.dot_product_attention(q, k, v, return_residual=True)[1].sum(), (0, 1))(q, k)
    expected = jax.grad(lambda q, k: plain(q, k).sum(), (0, 1))(q, k)
    for mine, theirs in zip(got, expected):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


def test_works_inside_jit_and_vmap_and_without_a_batch(rng):
    q, k, v = tensors(rng)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    attend = jax.jit(lambda q, k, v: remote.dot_product_attention(q, k, v, is_causal=True))
    np.testing.assert_allclose(attend(q, k, v), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(attend)(q, k, v), expected, rtol=1e-4, atol=1e-5)
    shared = jax.vmap(attend, in_axes=(0, None, None))(q, k[0], v[0])
    np.testing.assert_allclose(shared[1], attend(q[1], k[0], v[0]), rtol=1e-4, atol=1e-5)
    gradient = jax.vmap(jax.grad(lambda q, k, v: attend(q, k, v).sum()))(q, k, v)
    np.testing.assert_allclose(gradient, jax.grad(lambda q: attend(q, k, v).sum())(q), rtol=1e-4, atol=1e-5)


def test_failed_call_gives_nan_and_raises_afterwards(rng):
    q, k, v = tensors(rng)
    remote.connect("127.0.0.1:1", name="dead", timeout=2, retries=0)
    out = jax.jit(lambda q: remote.dot_product_attention(q, k, v, server="dead"))(q)
    assert np.isnan(out).all()
    with pytest.raises(attnd.Unavailable):
        remote.check("dead")
    remote.check("dead")


@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_connection_it_raises_at_once_and_nothing_stays(client, rng, compiled):
    q, k, v = tensors(rng)
    attend = (lambda q: remote.dot_product_attention(q, k, v, server=f"later {compiled}"))
    attend = jax.jit(attend) if compiled else attend
    for _ in range(2):
        with pytest.raises(attnd.Unavailable, match='not connected: call attnd.jax.connect.*name="later') as caught:
            attend(q)
        assert caught.value.reason == "NOT_CONNECTED"
    remote.connect(client, name=f"later {compiled}")
    np.testing.assert_allclose(attend(q), jax.nn.dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_an_eager_call_raises_its_own_error_and_leaves_none(own_daemon, rng):
    q, k, v = tensors(rng)
    remote.connect(own_daemon.address, name="gone", timeout=20, retries=0)
    attend = (lambda q: remote.dot_product_attention(q, k, v, server="gone"))
    out, pull = jax.vjp(attend, q)
    own_daemon.kill()
    for call in (lambda: attend(q), lambda: jax.grad(lambda q: attend(q).sum())(q), lambda: pull(out)):
        with pytest.raises(attnd.Unavailable, match="no attnd server at"):
            call()
        remote.check("gone")


def test_connecting_forgets_errors_of_the_connection_before(client, rng):
    q, k, v = tensors(rng)
    remote.connect("127.0.0.1:1", name="again", timeout=2, retries=0)
    assert np.isnan(jax.jit(lambda q: remote.dot_product_attention(q, k, v, server="again"))(q)).all()
    remote.connect(client, name="again")
    assert np.isfinite(remote.dot_product_attention(q, k, v, server="again")).all()
