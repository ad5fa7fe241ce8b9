"""Programs of training do this to a net (module_programs.py): each action of the same net in PyTorch and offloaded."""
import copy
import math
import random

import torch
from torch import nn

import attnd.torch


class Net(nn.Module):
    def __init__(self, layers=3, is_sequential=False):
        super().__init__()
        self.inp, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        made = [nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.0), nn.Linear(24, 16), nn.LayerNorm(16))
                for _ in range(layers)]
        self.layers = nn.Sequential(*made) if is_sequential else nn.ModuleList(made)
        self.skipped, self.gated, self.collects, self.at_once = (), None, False, False

    def forward(self, x):
        x, states = self.inp(x), []
        if self.at_once:
            return self.head(self.layers(x))
        for n, layer in enumerate(self.layers):
            if n not in self.skipped:
                x = x + torch.sigmoid(x.mean()) * layer(x) if n == self.gated else layer(x)
                states += [x] if self.collects else []
        return self.head(x + sum(states) / 10)


class Twin:
    """A net, its optimizers, and what an action may know of both. optimizer: offload's; None: the net stays here."""

    def __init__(self, is_sequential, optimizer=None, restart=lambda: None):
        self.is_sequential, self.optimizer = is_sequential, optimizer
        self.restart = restart if optimizer else lambda: None  # of the daemon
        self.other = self.scaler = self.saved = self.averaged = None
        self.optimizers, self.schedules = [], []

    def make(self, build, parameters):
        made = build(parameters)
        made = attnd.torch.optimizer(made) if self.optimizer == "server" else made
        made.made_by = build
        return made

    def place(self, net):
        """The net, with its layers where this twin has them."""
        if self.optimizer is not None:
            net.layers = attnd.torch.offload(net.layers, optimizer=self.optimizer, max_rows=64, kept_rows=256)
        return net

    def make_net(self):
        return self.place(Net(is_sequential=self.is_sequential))

    def loss(self, x, y):
        return ((self.net(x) - y) ** 2).mean()

    def loss_behind(self, h, y):
        """The loss, where h is what the layers give to the head."""
        return (self.net.head(h) - y).square().mean()


def entries(twin, optimizer, state):
    """A state's, but those of parameters that others have replaced, and of which a fused optimizer left out each step."""
    here, listed = set(map(id, twin.net.parameters())), [p for group in optimizer.param_groups for p in group["params"]]
    return [(n, entry) for n, entry in sorted(state["state"].items()) if id(listed[n]) in here and entry.get("step") != 0]


BUILDS = {  # eps: at 1e-8 Adam would make the rounding of a gradient that is nearly 0 as large as any
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, eps=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.8, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-1),
}
ACTIONS = {}


def action(weight=1):
    """fn(draw, batch) draws what the action is and gives what does it to a twin."""
    def add(fn):
        ACTIONS[fn.__name__] = fn, weight
        return fn
    return add


def data(draw, *shape):
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randn(*shape, 8, generator=generator), torch.randn(*shape, 4, generator=generator)


SHAPES = [(3, 5), (3, 5), (2, 5), (6,), (1, 2, 5), (4, 1), ()]


@action(6)
def train_step(draw):
    x, y = data(draw, *draw.choice(SHAPES))

    def act(twin):
        for one in twin.optimizers:
            one.zero_grad()
        twin.loss(x, y).backward()
        for one in twin.optimizers:
            one.step()
    return act


@action(3)
def backward(draw):
    x, y = data(draw, *draw.choice(SHAPES))
    scale = draw.choice([1.0, 1.0, 0.5])
    return lambda twin: (twin.loss(x, y) * scale).backward()


@action(3)
def step(draw):
    def act(twin):
        for one in twin.optimizers:
            one.step()
    return act


@action()
def step_one(draw):
    return lambda twin: twin.optimizers[-1].step()


@action(2)
def zero_grad(draw):
    to_none, of_net = draw.random() < 0.7, draw.random() < 0.5

    def act(twin):
        for one in [twin.net] if of_net else twin.optimizers:
            one.zero_grad(set_to_none=to_none)
    return act


@action()
def forget_one(draw):
    name = draw.choice(["layers.0.0.weight", "layers.1.4.bias", "head.weight"])
    return lambda twin: setattr(twin.net.get_parameter(name), "grad", None)


@action(2)
def clip(draw):
    order, most = draw.choice([2.0, 2.0, 1.0, math.inf]), draw.choice([0.05, 0.5, 5.0, 0.0])
    return lambda twin: nn.utils.clip_grad_norm_(twin.net.parameters(), most, norm_type=order)


@action()
def clip_part(draw):
    word, most = draw.choice(["layers.1", "weight", "head", "layers"]), draw.choice([0.02, 0.3])
    return lambda twin: nn.utils.clip_grad_norm_([p for n, p in twin.net.named_parameters() if word in n], most)


@action()
def clip_value(draw):
    def act(twin):
        found = [p for n, p in twin.net.named_parameters() if "layers" in n and p.grad is not None]
        if found:
            nn.utils.clip_grad_value_(found, 1e-2)
    return act


@action()
def scale_gradients(draw):
    factor = draw.choice([0.5, -1.0, 0.0, 2.0])

    def act(twin):
        for p in twin.net.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
    return act


@action()
def divide_gradients(draw):
    word = draw.choice(["layers.0", "bias", ""])

    def act(twin):
        for n, p in twin.net.named_parameters():
            if word in n and p.grad is not None:
                p.grad /= 3
    return act


@action()
def add_to_gradients(draw):
    return lambda twin: twin.net.get_parameter("layers.0.0.weight").grad.add_(0.1)


@action()
def zero_rows(draw):
    def act(twin):
        twin.net.get_parameter("layers.0.0.weight").grad[0] = 0
    return act


@action(2)
def lend_gradients(draw):
    kind, word = draw.randrange(6), draw.choice(["layers.0", "layers.1.3.weight", "weight", ""])
    seed = draw.randrange(1 << 30)

    def act(twin):
        with attnd.torch.local_gradients(twin.net):
            for n, (name, p) in enumerate(twin.net.named_parameters()):
                if word not in name or p.grad is None:
                    continue
                if kind == 0:
                    p.grad.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + n)) * 0.01)
                elif kind == 1:
                    p.grad[:1] = 0
                elif kind == 2:
                    p.grad = None
                elif kind == 3:
                    p.grad = p.grad.clamp(-1e-2, 1e-2)
                elif kind == 4:
                    p.grad.zero_()
                else:
                    nn.utils.clip_grad_norm_(p, 1e-2)
    return act


@action()
def give_gradients(draw):
    word, seed = draw.choice(["layers.0", "layers.1.3.weight", "bias"]), draw.randrange(1 << 30)

    def act(twin):
        with attnd.torch.local_gradients(twin.net):
            for n, (name, p) in enumerate(twin.net.named_parameters()):
                if word in name and p.requires_grad:
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + n)) * 0.01
    return act


@action()
def zero_one(draw):
    return lambda twin: twin.net.get_parameter("layers.1.3.weight").grad.zero_()


@action(2)
def freeze(draw):
    word, how = draw.choice(["layers.0", "layers.2.3", "bias", "inp"]), draw.random() < 0.5
    return lambda twin: [p.requires_grad_(how) for n, p in twin.net.named_parameters() if word in n]


@action(2)
def change_loop(draw):
    skipped, gated, collects = draw.choice([(), (), (0,), (1,), (0, 2)]), draw.choice([None, 0, 1]), draw.random() < 0.3

    def act(twin):
        twin.net.skipped, twin.net.gated, twin.net.collects = skipped, gated, collects
    return act


@action()
def gradient_of_a_state(draw):
    x, _ = data(draw, 2, 3)

    def act(twin):
        first = twin.net.layers[0](twin.net.inp(x))
        if first.requires_grad:
            twin.seen, = torch.autograd.grad(twin.net.layers[2](first).square().sum(), first)
    return act


@action()
def look_later(draw):
    x, _ = data(draw, 2, 3)

    def act(twin):
        late = twin.net.layers[0](twin.net.inp(x))
        for one in twin.optimizers:
            one.step()
        twin.seen = late.detach().clone()
    return act


@action()
def freeze_by_index(draw):
    count = draw.randrange(3)

    def act(twin):
        for n, layer in enumerate(twin.net.layers):
            for p in layer.parameters():
                p.requires_grad = n >= count
    return act


@action()
def change_rate(draw):
    lr = draw.choice([0.0, 1e-3, 2e-2])

    def act(twin):
        for one in twin.optimizers:
            for group in one.param_groups:
                group["lr"] = lr
    return act


@action()
def change_options(draw):
    beta, eps, decay = draw.choice([0.5, 0.0, 0.95]), draw.choice([1e-4, 1e-2]), draw.choice([0.0, 0.3])

    def act(twin):
        for one in twin.optimizers:
            for group in one.param_groups:
                group["weight_decay"] = decay
                if "betas" in group:
                    group.update(betas=(beta, 0.99), eps=eps)
                elif group["momentum"]:
                    group.update(momentum=beta)
    return act


@action()
def maximize(draw):
    def act(twin):
        made = twin.make(lambda p: torch.optim.SGD(p, lr=1e-2, maximize=True), twin.net.parameters())
        twin.optimizers, twin.schedules = [made], []
    return act


@action()
def new_optimizer(draw):
    kind = draw.choice(list(BUILDS))

    def act(twin):
        twin.optimizers, twin.schedules = [twin.make(BUILDS[kind], twin.net.parameters())], []
    return act


@action()
def two_optimizers(draw):
    kind, word = draw.choice(list(BUILDS)), draw.choice(["weight", "layers.0", "layers"])

    def act(twin):
        one = [p for n, p in twin.net.named_parameters() if word in n]
        two = [p for n, p in twin.net.named_parameters() if word not in n]
        made = [twin.make(BUILDS[kind], one), twin.make(BUILDS[kind], two)]
        twin.optimizers, twin.schedules = made, []
    return act


@action()
def part_and_late_group(draw):
    kind = draw.choice(list(BUILDS))

    def act(twin):
        parts = [[p for n, p in twin.net.named_parameters() if ("layers.1" in n) == late] for late in (False, True)]
        made = twin.make(BUILDS[kind], parts[0])
        made.add_param_group({"params": parts[1], "lr": 2e-3})
        twin.optimizers, twin.schedules = [made], []
    return act


@action()
def schedule(draw):
    kind = draw.randrange(3)

    def act(twin):
        one = twin.optimizers[0]
        if kind == 0 and one.param_groups[0].get("momentum", 1):
            twin.schedules = [torch.optim.lr_scheduler.OneCycleLR(one, max_lr=2e-2, total_steps=100)]
        else:
            twin.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.8)]
    return act


@action(2)
def schedule_step(draw):
    return lambda twin: [one.step() for one in twin.schedules]


@action()
def scaled_step(draw):
    x, y = data(draw, 3, 5)
    unscales, factor = draw.random() < 0.5, draw.choice([1.0, 1.0, math.inf])

    def act(twin):
        one = twin.optimizers[0]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        twin.net.zero_grad()
        scaler.scale(twin.loss(x, y) * factor).backward()
        if unscales:
            scaler.unscale_(one)
            nn.utils.clip_grad_norm_(twin.net.parameters(), 0.3)
        scaler.step(one)
        scaler.update()
        twin.seen = torch.tensor(scaler.get_scale())
    return act


@action()
def save(draw):
    def act(twin):
        states = [one.state_dict() for one in twin.optimizers]
        states = [{**state, "state": dict(entries(twin, one, state))} for one, state in zip(twin.optimizers, states)]
        twin.saved = copy.deepcopy([twin.net.state_dict(), states])
    return act


@action()
def load(draw):
    with_optimizers = draw.random() < 0.6

    def act(twin):
        if twin.saved is not None and (not with_optimizers or len(twin.saved[1]) == len(twin.optimizers)):
            kinds = [[set(group) for group in one.param_groups] for one in twin.optimizers]
            if with_optimizers and kinds != [[set(group) for group in one["param_groups"]] for one in twin.saved[1]]:
                return
            twin.net.load_state_dict(twin.saved[0])
            for one, state in zip(twin.optimizers, twin.saved[1] if with_optimizers else []):
                one.load_state_dict(copy.deepcopy(state))
    return act


@action()
def load_assigned(draw):
    state = Net().state_dict()
    return lambda twin: twin.net.load_state_dict(copy.deepcopy(state), assign=True)


@action()
def load_part(draw):
    torch.manual_seed(draw.randrange(1 << 30))
    state = {name: tensor for name, tensor in Net().state_dict().items() if "layers.1" in name}
    return lambda twin: twin.net.load_state_dict(state, strict=False)


@action()
def load_layer(draw):
    torch.manual_seed(draw.randrange(1 << 30))
    state = Net().layers[1].state_dict()
    return lambda twin: twin.net.layers[1].load_state_dict(state)


@action()
def write_weights(draw):
    how = draw.randrange(4)
    tensor = torch.randn(24, 16, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))

    def act(twin):
        p = twin.net.get_parameter("layers.2.0.weight")
        with torch.no_grad():
            if how == 0:
                p.mul_(0.5)
            elif how == 1:
                p.data = tensor.clone()
            elif how == 2:
                p.data.add_(0.01)
            else:
                nn.init.normal_(p, generator=torch.Generator().manual_seed(3))
    return act


@action()
def assign(draw):
    tensor = torch.randn(24, 16, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))) * 0.1
    return lambda twin: attnd.torch.assign_(twin.net.get_parameter("layers.2.0.weight"), tensor)


@action()
def lend_weights(draw):
    def act(twin):
        with attnd.torch.local_weights(twin.net), torch.no_grad():
            for p in twin.net.layers[1].parameters():
                p.mul_(0.9)
            nn.init.zeros_(twin.net.get_parameter("layers.2.0.bias"))
    return act


@action()
def set_dropout(draw):
    p = draw.choice([0.0, 0.5])

    def act(twin):
        for module in twin.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = p
                module.eval()
    return act


@action()
def mode(draw):
    training = draw.random() < 0.5

    def act(twin):
        if training:
            for module in twin.net.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        twin.net.train(training)
    return act


@action()
def change_norm(draw):
    eps = draw.choice([1e-5, 0.3])

    def act(twin):
        dict(twin.net.named_modules())["layers.1.4"].eps = eps
    return act


@action()
def change_activation(draw):
    made = draw.choice([nn.ReLU, nn.Tanh, nn.GELU])

    def act(twin):
        twin.net.layers[0][1] = made()
    return act


@action()
def replace_piece(draw):
    torch.manual_seed(draw.randrange(1 << 30))
    made = nn.Linear(16, 24)

    def act(twin):
        dict(twin.net.named_modules())["layers.1"][0] = copy.deepcopy(made)
    return act


@action()
def hook(draw):
    def act(twin):
        module = dict(twin.net.named_modules())["layers.0.0"]
        handle = module.register_forward_hook(lambda module, inputs, output: output * 2)
        try:
            twin.net(data(random.Random(1), 2, 3)[0])
        except TypeError:  # a piece that was put in place of another, of which the stack has learnt with the call
            handle.remove()
            raise
    return act


@action()
def look_between(draw):
    x, _ = data(draw, 3, 5)

    def act(twin):
        with torch.no_grad():
            h = twin.net.inp(x)
            for layer in twin.net.layers:
                h = layer(h) * 0.5
        twin.seen = h
    return act


@action()
def skip_a_layer(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        h = twin.net.inp(x)
        for n, layer in enumerate(twin.net.layers):
            if n != 1:
                h = layer(h)
        twin.loss_behind(h, y).backward()
    return act


@action()
def slice_of_layers(draw):
    x, _ = data(draw, 3, 5)
    last = draw.choice([1, 2, 3])

    def act(twin):
        with torch.no_grad():
            h = twin.net.inp(x)
            for layer in twin.net.layers[:last]:
                h = layer(h)
            twin.seen = twin.net.head(h)
    return act


@action()
def step_with_closure(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        def closure():
            twin.optimizers[0].zero_grad()
            loss = twin.loss(x, y)
            loss.backward()
            return loss
        twin.optimizers[0].step(closure)
    return act


@action()
def empty_batch(draw):
    x, _ = data(draw, 0, 5)

    def act(twin):
        twin.seen = twin.net(x).detach()
    return act
