"""offload(layers, servers=): consecutive layers on each of several daemons, beside all of them on one."""
import collections
import copy
import signal
import threading
import time

import pytest
from conftest import Daemon, check_same

torch = pytest.importorskip("torch")

import attnd.torch  # noqa: E402
from attnd.modules.module import Module  # noqa: E402
from attnd.modules.ranges import cut  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("two_daemons")
WIDTH = 16


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
    ask = eval("lambda model: model._ddp_params_and_buffers_to_ignore", {"__name__": "torch.nn.parallel.distributed"})
    with pytest.raises(TypeError, match="DistributedDataParallel: layers was offloaded for one"):
        ask(two)


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


# ---- micro_batches=

def encoders(dropout=0.0, **options):
    torch.manual_seed(3)
    return attnd.torch.offload(nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout, batch_first=True)
                                              for _ in range(4)]), **options)


def run(stack, x, dy, *arguments, seed=1):
    """y and the gradient of x."""
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y = stack(x, *arguments)
    y.backward(dy)
    return y.detach(), x.grad


def gradients(stack):
    return [attnd.torch.fetch(parameter.grad) for parameter in stack.parameters()]


def check_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.fixture
def cut_in(monkeypatch):
    """Batches of each call of a daemon."""
    found = []
    forward = Module.forward
    monkeypatch.setattr(Module, "forward", lambda self, x, **options: (found.append(len(x.bits)),
                                                                       forward(self, x, **options))[1])
    return found


TWO = {"servers": ["a", "b"]}


@pytest.mark.parametrize("count, sizes, where", [(3, [3, 2, 2], TWO), (16, [1] * 7, TWO), (1, [7], TWO),
                                                 (5, [2, 2, 1, 1, 1], {"server": "a"})])
def test_micro_batches_have_the_bits_of_as_many_calls(cut_in, count, sizes, where):
    cut_up, plain = (encoders(**where, max_rows=35, micro_batches=n) for n in (count, 1))
    x, dy = torch.randn(2, 7, 5, WIDTH)
    found = run(cut_up, x, dy)
    assert sorted(cut_in) == sorted(len(where.get("servers", "a")) * sizes)
    parts = [run(plain, *part) for part in zip(torch.split(x, sizes), torch.split(dy, sizes))]
    check_equal(found, [torch.cat(one) for one in zip(*parts)])
    check_equal(gradients(cut_up), gradients(plain))


def test_micro_batches_have_the_dropout_of_the_whole_call():
    x, dy = torch.randn(2, 7, 5, WIDTH)
    found = [run(encoders(0.25, servers=["a", "b"], micro_batches=n), x, dy) for n in (4, 1)]
    check_equal(*found)
    assert not torch.equal(found[0][0], run(encoders(servers=["a", "b"]), x, dy)[0])


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_micro_batches_of_1024_rows_have_all_bits_of_the_whole_call(precision):
    x, dy = torch.randn(2, 4, 1024, WIDTH)
    one, other = (encoders(servers=["a", "b"], precision=precision, micro_batches=n) for n in (4, 1))
    check_equal(run(one, x, dy), run(other, x, dy))
    check_equal(gradients(one), gradients(other))


def test_masks_lengths_and_memories_are_cut_too(cut_in):
    lengths = torch.tensor([5, 3, 0, 4, 1])
    padding = torch.arange(5) >= lengths[:, None]
    mask = torch.rand(5 * 2, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.3
    mask[:, :, 0] = False
    x, dy = torch.randn(2, 5, 5, WIDTH)
    for arguments in ((None, padding), (mask,), (torch.triu(torch.ones(5, 5, dtype=torch.bool), 1),)):
        del cut_in[:]
        check_equal(*[run(encoders(servers=["a", "b"], micro_batches=n), x, dy, *arguments) for n in (2, 1)])
        assert sorted(cut_in) == [2, 2, 3, 3, 5, 5]

    def decode(batch_first, micro_batches):
        torch.manual_seed(3)
        layers = nn.ModuleList([nn.TransformerDecoderLayer(WIDTH, 2, 24, 0.25, batch_first=batch_first) for _ in range(2)])
        stack = attnd.torch.offload(layers, servers=["a", "b"], micro_batches=micro_batches)
        memory = torch.randn(5, 5, WIDTH, generator=torch.Generator().manual_seed(4)).requires_grad_()
        return (*run(stack, x, dy, memory, None, None, None, padding), memory.grad)
    for batch_first in (True, False):
        check_equal(*[decode(batch_first, n) for n in (3, 1)])


def test_a_loop_over_layers_passes_micro_batches_from_daemon_to_daemon(monkeypatch):
    """Whoever computes first waits until the other has begun as well."""
    model = Model(servers=["a", "b"], micro_batches=4)
    a, b = model.layers.stacks
    begun = {name: threading.Event() for name in ("forward", "backward")}
    counts = {}
    for name, first, second in (("forward", a, b), ("backward", b, a)):
        def call(self, *given, of=getattr(Module, name), name=name, first=first, second=second, **options):
            if self is second.module:
                begun[name].set()
            counts[name, self] = counts.get((name, self), 0) + 1
            if self is first.module and counts[name, self] == 4:
                assert begun[name].wait(30), name
            return of(self, *given, **options)
        monkeypatch.setattr(Module, name, call)
    tokens = torch.arange(20).reshape(4, 5) % 11
    model(tokens).square().sum().backward()
    assert sorted(counts.values()) == [4, 4, 4, 4]


def test_what_passes_between_daemons_can_be_looked_at():
    stack, plain = (encoders(servers=["a", "b"], micro_batches=n) for n in (4, 1))

    def states(stack, is_written, is_used):
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        between = stack[1](stack[0](x))
        if is_written:
            between.register_hook(lambda gradient: gradient.mul_(2))
        loss = stack[3](stack[2](between)).square().sum()
        return torch.autograd.grad(loss + between.sum() if is_used else loss, [x, between])
    for how in ((False, False), (True, False), (False, True), (True, True)):
        for one, other in zip(states(stack, *how), states(plain, *how)):
            assert (one.numpy() == other.numpy()).all(), how


def test_a_daemon_that_dies_among_micro_batches_loses_nothing(monkeypatch, own_daemon):
    attnd.torch.connect(own_daemon.address, name="own", timeout=60, wait_for_ready=True)
    x, dy = torch.randn(2, 6, 5, WIDTH)
    expected = encoders(servers=["a", "b"], micro_batches=3)
    quiet = run(expected, x, dy)
    for order, name in ((["own", "b"], "forward"), (["own", "b"], "backward"), (["a", "own"], "forward"),
                        (["a", "own"], "backward")):
        stack = encoders(servers=order, micro_batches=3)
        with torch.no_grad():
            stack(x)  # registered
        calls = []

        def call(self, *given, of=getattr(Module, name), stack=stack.stacks[order.index("own")], calls=calls, **options):
            if self is stack.module:
                calls.append(1)
                if len(calls) == 2:
                    own_daemon.kill()
                    own_daemon.start()
            return of(self, *given, **options)
        with monkeypatch.context() as patched:
            patched.setattr(Module, name, call)
            check_equal(run(stack, x, dy), quiet)
        assert len(calls) == 3
        check_equal(gradients(stack), gradients(expected))
    attnd.torch.disconnect("own")


def test_what_fails_is_raised_by_backward_and_leaves_nothing(monkeypatch):
    stack, other = (encoders(servers=["a", "b"], micro_batches=3) for _ in range(2))
    x, dy = torch.randn(2, 6, 5, WIDTH)
    for name in ("forward", "backward"):
        for failing in stack.stacks:
            calls = []

            def call(self, *given, of=getattr(Module, name), failing=failing, calls=calls, **options):
                if self is failing.module:
                    calls.append(1)
                    if len(calls) == 2:
                        raise attnd.Unavailable("the second is not computed")
                return of(self, *given, **options)
            if failing.module is None:
                run(stack, x, dy)
            with monkeypatch.context() as patched:
                patched.setattr(Module, name, call)
                with pytest.raises(attnd.Unavailable, match="the second is not computed"):
                    torch.autograd.backward([stack(x), stack(x)], [dy, dy])  # no gradient of x
                stack.zero_grad()
            most = 3 if name == "forward" else 6  # the third may have begun beside the second; the other call's are tried
            assert len(calls) in (most - 1, most)
    check_equal(run(stack, x, dy), run(other, x, dy))
    check_equal(gradients(stack), gradients(other))


class Calls:
    """Calls of a stack's daemon: `before` is called first, with the number of a backward in its module's order."""

    def __init__(self, monkeypatch, stack, name, before):
        self.begun, self.ended, self.errors = 0, collections.defaultdict(threading.Event), {}
        call, module = getattr(Module, name), stack.module
        assert module is not None

        def numbered(self_, *given, **options):
            if self_ is not module:
                return call(self_, *given, **options)
            number = options["turn"] - 1 if name == "backward" else self.begun
            self.begun += 1
            try:
                before(number, options)
                return call(self_, *given, **options)
            except BaseException as error:
                self.errors[number] = error
                raise
            finally:
                self.ended[number].set()
        monkeypatch.setattr(Module, name, numbered)


def registered(x, servers=("a", "b"), **options):
    """A stack with its optimizer, whose modules the daemons have."""
    stack = encoders(servers=servers, **options)
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(stack.parameters(), lr=3e-3))
    with torch.no_grad():
        stack(x)
    return stack, optimizer


def trained(stack, optimizer, x, dy):
    """Two steps: outputs, gradients of inputs and of weights of each, and the weights."""
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        made = [run(stack, *part) for part in zip(x, dy)]
        found += [torch.cat(one) for one in zip(*made)] + gradients(stack)
        optimizer.step()
    return found + list(stack.state_dict().values())


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_three_micro_batches_are_under_way_at_each_daemon(monkeypatch, name):
    """None goes on before two others have begun."""
    x, dy = torch.randn(2, 6, 5, WIDTH)
    (stack, optimizer), plain = (registered(x, micro_batches=n) for n in (6, 1))
    for half in stack.stacks:
        meet = threading.Barrier(3, timeout=30)
        Calls(monkeypatch, half, name, lambda number, options, meet=meet: meet.wait())
    check_equal(trained(stack, optimizer, [x], [dy]), trained(*plain, x.split(1), dy.split(1)))


@pytest.mark.parametrize("precision", [None, "bf16", "f16"])
def test_gradients_are_added_in_order_however_micro_batches_come(monkeypatch, precision):
    """Every second backward comes after the one behind it, or after as long as that one would take to be added."""
    x, dy = torch.randn(2, 5, 5, WIDTH)
    if precision == "f16":
        dy *= torch.tensor([1.0, 1e-7, 1e-3, 1e7, 1.0])[:, None, None]  # the power of two changes on the way
    (stack, optimizer), plain = (registered(x, precision=precision, micro_batches=n) for n in (5, 1))
    expected = trained(*plain, x.split(1), dy.split(1))

    def late(number, options):
        if number % 5 in (1, 3):
            calls.ended[number + 1].wait(0.3)
    calls = Calls(monkeypatch, stack.stacks[1], "backward", late)
    check_equal(trained(stack, optimizer, [x], [dy]), expected)
    assert sorted(calls.ended) == list(range(10))


@pytest.mark.parametrize("how", ["comes back", "is gone", "drains"])
def test_a_daemon_that_ends_while_it_has_two_backwards_loses_nothing(monkeypatch, how):
    x, dy = torch.randn(2, 5, 5, WIDTH)
    expected = trained(*registered(x), x.split(1), dy.split(1))
    daemons = [Daemon("--drain_delay", "0", "--drain_timeout", "20") for _ in range(1 if how == "comes back" else 2)]
    attnd.torch.connect([one.address for one in daemons], name="own", timeout=60, wait_for_ready=True)
    stack, optimizer = registered(x, ["a", "own"], micro_batches=5)
    module, home = stack.stacks[1].module, next(one for one in daemons if one.metric("attnd_modules") > 0)
    meet = threading.Barrier(2, home.pause, timeout=30)

    def end():
        while module.micro_batches < 3:  # both have been sent, or will be at once
            time.sleep(0.001)
        if how == "drains":
            home.process.send_signal(signal.SIGTERM)
            home.process.send_signal(signal.SIGCONT)
            return
        home.kill()
        if how == "comes back":
            home.start()
    ending = threading.Thread(target=end)

    def pair(number, options):
        if number in (1, 2) and meet.wait() == 0:
            ending.start()
    Calls(monkeypatch, stack.stacks[1], "backward", pair)
    check_equal(trained(stack, optimizer, [x], [dy]), expected)
    ending.join()
    attnd.torch.disconnect("own")
    for one in daemons:
        one.stop()


@pytest.mark.parametrize("fails", ["before it is sent", "after it was sent"])
def test_a_backward_that_fails_ends_those_beside_it(monkeypatch, own_daemon, fails):
    """They wait for the one before them no longer."""
    attnd.torch.connect(own_daemon.address, name="own", timeout=60)
    x, dy = torch.randn(2, 5, 5, WIDTH)
    expected = trained(*registered(x), x.split(1), dy.split(1))
    stack, optimizer = registered(x, ["a", "own"], micro_batches=5)
    half, meet = stack.stacks[1], threading.Barrier(3, timeout=30)

    def fail(number, options):
        if number not in (1, 2, 3):
            return
        meet.wait()
        if number == 1 and fails == "before it is sent":
            raise attnd.Unavailable("the second is not computed")
        if number == 1:
            own_daemon.pause()
            options["timeout"] = 0.5
    with monkeypatch.context() as patched:
        calls = Calls(patched, half, "backward", fail)
        with pytest.raises(attnd.AttndError) as error:
            run(stack, x, dy)
    own_daemon.process.send_signal(signal.SIGCONT)
    assert error.value is calls.errors[1] and calls.begun == 4
    for number in (2, 3):
        assert isinstance(calls.errors[number], attnd.FailedPrecondition) and "turn: expected" in str(calls.errors[number])
    stack.zero_grad()
    check_equal(trained(stack, optimizer, [x], [dy]), expected)
    attnd.torch.disconnect("own")


def test_micro_batches_are_refused_where_they_have_no_use():
    with pytest.raises(attnd.InvalidArgument, match="micro_batches: expected 1 with a group.* and with optimizer=\"local\""):
        encoders(servers=["a", "b"], micro_batches=2, optimizer="local")
    with pytest.raises(attnd.InvalidArgument, match="micro_batches"):
        encoders(servers=["a", "b"], micro_batches=0)
