"""offload(layers, servers=): consecutive layers on each of several daemons, beside all of them on one."""
import copy

import pytest
from conftest import Daemon

torch = pytest.importorskip("torch")

import attnd.torch  # noqa: E402
from attnd.modules.ranges import cut  # noqa: E402
from torch import nn  # noqa: E402

WIDTH = 16


@pytest.fixture(scope="module", autouse=True)
def connected(daemon):
    other = Daemon()
    for name, address in (("", daemon.address), ("a", daemon.address), ("b", other.address)):
        attnd.torch.connect(address, name=name, timeout=60)
    yield
    for name in ("", "a", "b"):
        attnd.torch.disconnect(name)
    other.stop()


class Model(nn.Module):
    """Five layers, of which the last is as expensive as the others together, between an embedding and a head."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, inner, 0.0, batch_first=True)
                                for inner in (24, 24, 24, 24, 240)])
        self.layers = attnd.torch.offload(layers, **options) if options else layers

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers[:2]:
            x = layer(x)
        for n in range(2, len(self.layers)):
            x = self.layers[n](x)
        return self.head(x)


def train(model, steps=3, each=2):
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(each):
            generator = torch.Generator().manual_seed(step * each + n)
            tokens = torch.randint(0, 11, (2, 6), generator=generator)
            (nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / each).backward()
        norms.append(float(attnd.torch.clip_grad_norm_(model, 0.5)))
        optimizer.step()
    return optimizer, norms


def check_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_two_daemons_train_to_the_bits_of_one():
    one, two = Model(max_rows=10), Model(servers=["a", "b"], max_rows=10)
    assert [len(stack) for stack in two.layers.stacks] == [4, 1]
    assert isinstance(two.layers[1:3], nn.ModuleList) and two.layers[4] is list(two.layers)[-1]
    assert [name for name, _ in two.named_parameters()] == [name for name, _ in one.named_parameters()]
    (here, norms), (there, found) = train(one), train(two)
    assert found == norms
    check_same(two.state_dict(), one.state_dict())
    for number, state in here.state_dict()["state"].items():
        check_same(there.state_dict()["state"][number], state)
    assert [stack.module.sequence for stack in two.layers.stacks] == [stack.module.sequence for stack in (one.layers,) * 2]


def test_ranges_are_read_written_and_copied_as_one_list():
    two, plain = Model(servers=["a", "b"]), Model()
    train(two, steps=1)
    plain.load_state_dict(two.state_dict())
    tokens = torch.arange(8).reshape(2, 4)
    assert not plain.layers[4].linear1.weight.is_meta
    torch.testing.assert_close(two(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    x = torch.randn(2, 4, WIDTH)
    assert torch.equal(two.layers(x), two.layers[4](two.layers.stacks[0](x)))
    twin = copy.deepcopy(two)
    with torch.no_grad():
        attnd.torch.assign_(two.layers[4].linear2.bias, torch.ones(WIDTH))
    assert float(attnd.torch.fetch(two.layers[4].linear2.bias).sum()) == WIDTH
    check_same(twin.state_dict(), plain.state_dict())
    with attnd.torch.local_weights(two):
        two.layers[0].linear1.bias.data.fill_(2.0)
        two.layers[4].linear1.bias.data.fill_(3.0)
    assert [float(attnd.torch.fetch(two.layers[n].linear1.bias)[0]) for n in (0, 4)] == [2.0, 3.0]
    two.load_state_dict(plain.state_dict())
    check_same(two.state_dict(), plain.state_dict())
    two.layers[3] = nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True)
    assert two(tokens).shape == (2, 4, 11) and two.layers[3].linear1.weight.is_meta
    with pytest.raises(TypeError, match="DistributedDataParallel: layers was offloaded for one"):
        two._ddp_params_and_buffers_to_ignore


@pytest.mark.parametrize("costs, count, ends", [((1, 1, 1, 1), 2, [2, 4]), ((4, 1, 1, 1, 1), 2, [1, 5]),
                                                ((1, 1, 1, 5, 1, 1), 3, [3, 4, 6]), ((1, 1), 2, [1, 2]), ((3,), 1, [1])])
def test_layers_are_cut_where_the_most_expensive_range_is_cheapest(costs, count, ends):
    assert cut([nn.Linear(8, 8 * cost, bias=False) for cost in costs], count) == ends


def test_what_cannot_be_cut_is_refused_before_anything_changes():
    layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)])
    for given, options in ((layers, {"servers": ["a", "b", "a"]}), (layers, {"servers": ["a", "b"], "server": "a"}),
                           (layers[0], {"servers": ["a"]})):
        with pytest.raises(attnd.InvalidArgument, match="servers: expected names of connections, at most one a layer"):
            attnd.torch.offload(given, **options)
    with pytest.raises(attnd.Unavailable, match="nobody"):
        attnd.torch.offload(layers, servers=["a", "nobody"])
    layers[1].linear1.weight = layers[0].linear1.weight
    with pytest.raises(TypeError, match="1.linear1.weight is 0.linear1.weight too"):
        attnd.torch.offload(layers, servers=["a", "b"])
    assert not any(parameter.is_meta for parameter in layers.parameters())
