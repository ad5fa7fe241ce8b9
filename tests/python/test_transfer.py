"""CUDA tensors in attnd.torch: what moves where, on a fake device; and the same results as on the CPU."""
import pytest

torch = pytest.importorskip("torch")

import attnd  # noqa: E402
import attnd.torch as remote  # noqa: E402
from attnd import _transfer  # noqa: E402
from attnd._operator_options import Words  # noqa: E402
from fake_cuda import DEVICE, FakeCuda  # noqa: E402


@pytest.fixture
def fake(client, monkeypatch):
    remote.connect(client)
    return FakeCuda(monkeypatch)


def tensors():
    torch.manual_seed(7)
    q, k, v = [torch.randn(2, 9, heads, 16).transpose(1, 2) for heads in (4, 2, 2)]
    bias, mask, sink = torch.randn(1, 4, 9, 9), torch.rand(2, 1, 9, 9) < 0.8, torch.randn(4)
    return q, k, v, bias, mask, sink


def run(device_of, keep="bias", between=lambda: None):
    """Output, lse and all gradients of a call with everything, by the bodies of the two operators."""
    q, k, v, bias, mask, sink = [device_of(t) for t in tensors()]
    call = (q, k, v, bias, mask.expand(2, 4, 9, 9), sink, *(None,) * 6, None, 0.0, 0.0,
            Words("bhld", "top_left", None, None, None, False, "f32", None, keep, 0, False, "", "").pack())
    out, lse, residual = remote._forward._init_fn(*call)
    between()
    return [out, lse, *remote._backward._init_fn(out * 0.5, lse * 1, out, lse, residual, True, *call)]


@pytest.mark.parametrize("keep", ["bias", ""])
def test_results_are_those_of_the_cpu_and_lie_on_the_device(fake, keep):
    expected = run(lambda t: t)
    with fake:
        got = run(fake.put, keep)
    assert [t.device for t in got] == [DEVICE] * len(got)
    for mine, theirs in zip(got, expected):
        assert mine.stride() == theirs.stride() and torch.equal(mine.hidden, theirs)


def test_everything_moves_through_pinned_memory_with_one_wait_a_call(fake):
    with fake:
        run(fake.put)
    assert fake.pageable_copies == 2  # the sink's few numbers, in each direction
    assert fake.synchronised == 2


def test_backward_fetches_the_output_gradient_alone_where_servers_kept_the_rest(fake):
    fetched = []

    def take():
        fetched.append(fake.fetched_bytes)
        fake.fetched_bytes = 0

    for keep in ("bias", ""):
        with fake:
            run(fake.put, keep, take)
        take()
    q, kv, lse = 2 * 4 * 9 * 16 * 4, 2 * 2 * 9 * 16 * 4, 2 * 4 * 9 * 4
    inputs = q + 2 * kv + 4 * 81 * 4 + 2 * 81  # the mask once, though it was expanded over the heads
    assert fetched == [inputs, q + lse, inputs, inputs + q + lse + q + lse]


def test_lost_residuals_are_made_good_from_the_copies(fake):
    expected = run(lambda t: t)
    with fake:
        got = run(fake.put, between=lambda: [kept.residual.release() for kept in remote._kept.values()])
    assert all(torch.equal(mine.hidden, theirs) for mine, theirs in zip(got, expected))


def test_copies_go_with_the_graph(fake):
    import gc
    with fake:
        held = []
        run(fake.put, between=lambda: held.append([kept.copies for kept in remote._kept.values()]))
    gc.collect()
    assert held[0] and not any(kept.copies is held[0][-1] for kept in remote._kept.values())


def test_tensors_of_different_devices_are_refused(fake):
    q, k, v, bias, *_ = tensors()
    with fake:
        for given, field in (((fake.put(q), k, fake.put(v)), "k"), ((q, k, fake.put(v)), "v")):
            with pytest.raises(attnd.InvalidArgument, match="on q's device") as caught:
                remote.attention(*given)
            assert caught.value.field == field
        with pytest.raises(attnd.InvalidArgument, match="bias: expected a tensor on q's device, cuda:0, got one on cpu"):
            remote.attention(fake.put(q), fake.put(k), fake.put(v), bias=bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_that_are_raised_to_float16_are_rounded_once(dtype):
    torch.manual_seed(0)
    x = (torch.randn(64, 33) * 10.0 ** torch.empty(64, 33).uniform_(-12, 6)).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    for tensor in (x, x.T, x[::2, 1:]):
        for power in (2.0 ** -70, 0.25, 1.0, 2.0 ** 9, 2.0 ** 100):
            got, expected = _transfer.raised(tensor, power), (tensor.to(torch.float32) * power).to(torch.float16)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan()), power


@pytest.mark.parametrize("numbers", [[-3.0, 2.0], [0.0], [1.0, -float("inf")], [float("nan"), 5.0], [-0.0]])
def test_the_largest_number_is_the_norm_of_infinite_order(numbers):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensor = torch.tensor(numbers, dtype=dtype)
        torch.testing.assert_close(_transfer.largest(tensor), float(torch.linalg.vector_norm(tensor, float("inf"))),
                                   equal_nan=True, rtol=0, atol=0)


def test_a_cast_is_a_copy_of_the_same_numbers_and_strides():
    x = torch.randn(600, 1024)
    for tensor in (x, x.T, x[::2]):
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            got, expected = _transfer.cast(tensor, dtype), tensor.to(dtype)
            assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert _transfer.cast(x, torch.float32) is x
