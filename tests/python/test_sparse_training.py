"""Sparse training with PyTorch: patterns against the authors' rules, zero-rest attention, the switch, restarts."""
import copy

import numpy as np
import pytest

import attnd

torch = pytest.importorskip("torch")
import attnd.torch  # noqa: E402
from attnd.sparse import SparseAttention, SparseTraining, sat, spion  # noqa: E402
from attnd.sparse.capture import pattern_layout  # noqa: E402
from conftest import Daemon  # noqa: E402

F = torch.nn.functional


@pytest.fixture
def own():
    daemon = Daemon()
    client = attnd.torch.connect(daemon.address, name="sparse", wait_for_ready=True)
    yield daemon
    client.close()
    daemon.stop()


# ---- The authors' rules, from their description: convolution, average, quantile and walk by PyTorch's own functions.

def convolved(attention, block):
    identity = torch.eye(31)[None, None]
    spread = F.conv2d(attention[None, None], identity, padding="same")
    return F.avg_pool2d(spread, block)[0, 0]


def walked(averages, quantile):
    n, threshold = averages.shape[0], torch.quantile(averages, quantile)
    around = F.pad(averages, (0, 1, 0, 1))
    kept = torch.zeros(n, n, dtype=torch.bool)
    for seed in [(0, c) for c in range(n)] + [(r, 0) for r in range(n)]:
        r, c = seed
        while r < n and c < n:
            below, right, both = around[r + 1, c], around[r, c + 1], around[r + 1, c + 1]
            if below > right:
                r, c = (r + 1, c) if below > both else (r + 1, c + 1)
            else:
                r, c = (r, c + 1) if right > both else (r + 1, c + 1)
            if r < n and c < n and around[r, c] > threshold:
                kept[r, c] = True
    return kept | torch.eye(n, dtype=torch.bool)


def maps():
    """50 maps: of random attention, with bands and stripes, with ties, constant, of zeros."""
    generator = torch.Generator().manual_seed(3)
    for n in range(50):
        side = 64 * (1 + n % 3)
        if n % 10 == 7:
            yield torch.full((side, side), 1 / side)
        elif n % 10 == 8:
            yield torch.zeros(side, side)
        elif n % 10 == 9:
            yield torch.randint(0, 3, (side, side), generator=generator) / 64
        else:
            scores = torch.randn(side, side, generator=generator) * (n % 4)
            scores -= (torch.arange(side)[:, None] - torch.arange(side) - 16 * (n % 5)).abs() / 4
            yield torch.softmax(scores, -1)


def test_patterns_are_the_authors():
    for number, attention in enumerate(maps()):
        block = (8, 16, 32)[number % 3]
        averages = convolved(attention, block)
        for quantile in (0.5, 0.9, 0.96):
            got = pattern_layout(averages.numpy(), rule="flood", block=block, quantile=quantile, force_diagonal=True)
            assert (torch.from_numpy(got) == walked(averages, quantile)).all(), number
        n = averages.shape[0]
        if len(averages.unique()) == n * n:  # without ties the largest are the largest
            got = pattern_layout(averages.numpy(), rule="top_k", block=block, density=0.4)
            want = torch.zeros(n * n, dtype=torch.bool)
            want[averages.flatten().topk(int(n * n * 0.4)).indices] = True
            assert (torch.from_numpy(got).flatten() == want).all()


def test_the_server_convolves_as_torch_does(own):
    q, k, v = torch.randn(3, 2, 2, 96, 16)
    layer = SparseAttention(server="sparse")
    layer.capture_next(attnd.sparse.Capture(32, keep=True))
    layer(q, k, v)
    attention = torch.softmax(q.double() @ k.double().mT / 4, -1).mean((0, 1)).float()
    got = pattern_layout(layer.captured, rule="flood", block=32, quantile=0.7, diagonals=True, force_diagonal=True)
    assert (torch.from_numpy(got) == walked(convolved(attention, 32), 0.7)).all()


# ---- Zero-rest attention: pruned keys are scores of 0.

def rest_attention(q, k, v, layout, block):
    """SAT's and SPION's sparse softmax, from its definition."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    shown = layout.repeat_interleave(block, 0).repeat_interleave(block, 1)[:q.shape[-2], :k.shape[-2]]
    weights = torch.where(shown, scores, 0.0).softmax(-1)
    return torch.where(shown, weights, 0.0) @ v


@pytest.mark.parametrize("rows", [96, 80])
def test_sparse_step(own, rows):
    generator = torch.Generator().manual_seed(4)
    layout = torch.rand(3, 3, generator=generator) < 0.5
    layout[1] = False  # a row of blocks that keeps nothing: no output, no gradients
    layer = SparseAttention(server="sparse")
    layer.set_pattern(layout.numpy(), 32)
    q, k, v = [torch.randn(2, 2, rows, 16, generator=generator, requires_grad=True) for _ in range(3)]
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, want = layer(q, k, v), rest_attention(*doubles, layout, 32)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    assert (out[:, :, 32:64] == 0).all()
    gradient = torch.randn(want.shape, generator=generator)
    out.backward(gradient)
    want.backward(gradient.double())
    for got, wanted in zip((q, k, v), doubles):
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("wrong", ["rest ignored", "rest is all keys", "transposed", "another layer's"])
def test_what_would_be_wrong_is_seen(own, wrong):
    layout = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    q, k, v = torch.randn(3, 1, 1, 96, 16, generator=torch.Generator().manual_seed(5))
    used = {"transposed": layout.T, "another layer's": torch.eye(3, dtype=torch.bool)}.get(wrong, layout)
    layer = SparseAttention(server="sparse", zero_rest=wrong != "rest ignored")
    layer.set_pattern(used.numpy(), 32)
    want = rest_attention(q, k, v, layout, 32)
    if wrong == "rest is all keys":
        shown = layout.repeat_interleave(32, 0).repeat_interleave(32, 1)
        weights = torch.where(shown, (q @ k.mT / 4).exp(), 0.0)
        got = weights / (weights.sum(-1, keepdim=True) + 96) @ v
    else:
        got = layer(q, k, v)
    assert (got - want).abs().max() > 1e-3


def test_a_full_pattern_is_dense(own):
    q, k, v = torch.randn(3, 2, 2, 64, 16)
    layer = SparseAttention(server="sparse")
    dense = layer(q, k, v)
    layer.set_pattern(np.ones((2, 2), bool), 32)
    torch.testing.assert_close(layer(q, k, v), dense, rtol=1e-6, atol=1e-6)


# ---- Memory: what a layer holds for its backward.

def saved_bytes(call):
    """Counts the bytes of the storages that autograd saves of a call, each once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held, so that no address comes again
        return tensor.detach()  # or an output would hold the graph that holds it
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    assert out.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_layer_holds_for_backward(own, batch):
    """N 1024, 2 heads of 32, as SAT's image task, whose batch is 512: everything held is the batch's multiple."""
    q, k, v = [torch.randn(batch, 2, 1024, 32, requires_grad=True) for _ in range(3)]
    layer, one = SparseAttention(server="sparse"), q.untyped_storage().nbytes()
    eager = saved_bytes(lambda: (q @ k.mT / 32 ** 0.5).softmax(-1) @ v)
    assert eager == 3 * one + batch * 2 * 1024 ** 2 * 4  # q, k, v and the map
    dense = saved_bytes(lambda: layer(q, k, v))
    layer.capture_next(attnd.sparse.Capture(32, keep=True))
    captured = saved_bytes(lambda: layer(q, k, v))
    assert own.metric("attnd_capture_bytes") >= 4 * 1024 ** 2  # the kept map, at the server
    layer.captured.release()
    layer.set_pattern(np.eye(32, dtype=bool), 32)
    sparse = saved_bytes(lambda: layer(q, k, v))
    assert sparse <= dense == captured == 4 * one + one // 32 + 1  # q, k, v, o, lse, and what stands for the lease
    assert own.metric("attnd_capture_bytes") == 0
    assert eager >= 6.87 * dense


# ---- Training.

class Model(torch.nn.Module):
    def __init__(self, learned=False):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.attention = torch.nn.ModuleList(
            SparseAttention(server="sparse", learned=(64, 8) if learned else None, block=16) for _ in range(2))

    def forward(self, x):
        for project, attention in zip(self.project, self.attention):
            q, k, v = project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + attention(q, k, v).transpose(1, 2).flatten(-2)
        return x


def train(model, training, steps, each=lambda step: None, learned=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(steps):
        each(step)
        optimizer.zero_grad()
        with training.step():
            loss = model(x).square().mean()
            if learned and training.captures:
                loss = loss + 0.02 * sum(a.pattern_loss() for a in model.attention)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_dense_then_captured_then_sparse(own):
    model, reports = Model(), []
    training = SparseTraining(model.attention, spion(16, quantile=0.5), every=2, on_switch=reports.append)
    train(model, training, 5)
    assert training.phase == "dense"
    train(model, training, 20)
    assert training.phase == "sparse" and len(reports) == 1 and reports[0].settled
    assert training.switched_at is not None and (training.switched_at + 1) % 2 == 0
    assert own.metric("attnd_capture_bytes") == 0  # freed at the switch
    assert all(0 < a._layout.mean() < 1 and a._layout.diagonal().all() for a in model.attention)
    state = copy.deepcopy(model.state_dict())
    other = Model()
    other.load_state_dict(state)
    x = torch.randn(1, 64, 16)
    assert [a.phase for a in other.attention] == ["sparse"] * 2
    assert torch.equal(other(x), model(x))


def test_learned_pattern(own):
    model = Model(learned=True)
    training = SparseTraining(model.attention, sat(16, density=0.5, change=1000.0, skewness=0.01), every=1)
    before = model.attention[0].pattern.detach().clone()
    train(model, training, 6, learned=True)
    assert training.phase == "sparse"
    for attention in model.attention:
        scores = attention.pattern @ attention.pattern.T
        assert not torch.equal(attention.pattern, before) and attention._layout.sum() == 8
        assert scores.shape == (4, 4) and (attention._layout == attention._layout.T).all()


def test_a_restart_of_the_daemon_in_any_phase(own):
    quiet, restarted = Model(), Model()
    first = SparseTraining(quiet.attention, spion(16, quantile=0.5), every=2)
    want = train(quiet, first, 24)

    def restart(step):
        if step in (3, 20):
            own.kill()
            own.start()
    second = SparseTraining(restarted.attention, spion(16, quantile=0.5), every=2)
    got = train(restarted, second, 24, restart)
    assert first.phase == second.phase == "sparse"
    assert second.switched_at > first.switched_at  # captures began anew
    assert got[:first.switched_at] == want[:first.switched_at]


def test_without_settling_training_stays_dense(own):
    model = Model()
    training = SparseTraining(model.attention, spion(16, quantile=0.5), every=1, warmup=100)
    train(model, training, 6)
    assert training.phase == "dense" and "warm-up" in str(training.tracker.last)


def test_what_cannot_be_is_told():
    with pytest.raises(attnd.InvalidArgument, match="learned pattern"):
        SparseTraining([SparseAttention()], sat(16, density=0.1), every=1)
    with pytest.raises(attnd.InvalidArgument, match="quantile: expected one of"):
        spion(16)
    training = SparseTraining([SparseAttention()], spion(16, quantile=0.5), every=1)
    with pytest.raises(attnd.InvalidArgument, match="layer 0"):
        with training.step():
            pass
