"""More that programs of training do to a net, as module_actions.py: whole models, their layers, weights and calls."""
import copy
import io
import threading

import torch
from module_actions import BUILDS, SHAPES, Net, action, data
from optimizer_actions import numbers, train
from torch import nn
from torch.nn.utils import parametrizations, prune

import attnd.torch


def made_layer(seed):
    torch.manual_seed(seed)
    return Net(1).layers[0]


@action()
def call_at_once(draw):
    at_once = draw.random() < 0.7

    def act(twin):
        twin.net.at_once = at_once and twin.is_sequential
    return act


@action()
def call_with_tensors(draw):
    x, y = data(draw, 3, 5)
    names, factor = draw.choice([["head.weight"], ["layers.1.0.weight"], ["layers.1.0.weight", "inp.bias"], None]), 0.5
    seed = draw.randrange(1 << 30)

    def act(twin):
        given = dict(twin.net.named_parameters())
        if names is not None:
            given = {name: torch.randn(given[name].shape, generator=torch.Generator().manual_seed(seed)) * factor
                     for name in names}
        made = torch.func.functional_call(twin.net, given, (x,))
        twin.seen = made.detach()
        (made - y).square().mean().backward()
    return act


@action()
def call_by_functions(draw):
    x, y = data(draw, 2, 5)
    how = draw.randrange(5)

    def act(twin):
        def loss(own):
            return (twin.net(own) - y).square().mean()
        if how == 0:
            twin.seen = torch.func.grad(loss)(x)
        elif how == 1:
            twin.seen = torch.func.vmap(twin.net)(x).detach()
        elif how == 2:
            twin.seen = torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
        elif how == 3:
            twin.seen = torch.autograd.functional.jacobian(loss, x)
        else:
            twin.seen = torch.func.vjp(twin.net, x)[1](y)[0]
    return act


@action()
def hook_of_all_modules(draw):
    x, _ = data(draw, 3, 5)
    how = draw.randrange(3)
    count = []

    def hook(module, *_):
        count.append(type(module).__name__)

    def act(twin):
        count.clear()
        register = [nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook,
                    nn.modules.module.register_module_full_backward_hook][how]
        handle = register(hook)
        try:
            twin.net(x).sum().backward()
        finally:
            handle.remove()
        twin.seen = torch.tensor(float(count.count("Linear")))
    return act


@action()
def tie_layers(draw):
    x, _ = data(draw, 2, 3)
    outside = draw.random() < 0.3

    def act(twin):
        owner = twin.net.layers[1][0]
        kept = owner.weight
        try:
            if outside:
                twin.seen = nn.functional.linear(torch.ones(1, 16), kept)
            else:
                owner.weight = twin.net.layers[0][0].weight
                twin.seen = twin.net(x).detach()
        finally:
            owner.weight = kept
    return act


@action()
def replace_layer(draw):
    seed, index, by_name = draw.randrange(1 << 30), draw.randrange(3), draw.random() < 0.5

    def act(twin):
        made = made_layer(seed)
        if by_name:
            setattr(twin.net.layers, str(index), made)
        else:
            twin.net.layers[index] = made
    return act


@action()
def swap_layers(draw):
    x, _ = data(draw, 3, 5)

    def act(twin):
        layers = twin.net.layers
        kept = layers[0], layers[2]
        try:
            layers[0], layers[2] = layers[2], layers[0]
            twin.seen = twin.net(x).detach()
        finally:
            layers[0], layers[2] = kept
    return act


@action()
def change_the_list(draw):
    x, _ = data(draw, 3, 5)
    how = draw.randrange(3)

    def act(twin):
        layers = twin.net.layers
        if how == 0:
            last = layers[2]
            del layers[2]
            try:
                twin.seen = twin.net(x).detach()
            finally:
                layers.append(last)
        elif how == 1:
            layers.append(nn.Identity())
            try:
                twin.seen = twin.net(x).detach()
            finally:
                del layers[3]
        else:
            last = layers.pop(2)
            layers.insert(2, last)
            twin.seen = twin.net(x).detach()
    return act


@action()
def new_parameter(draw):
    how = draw.randrange(4)
    tensor = torch.randn(24, 16, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))) * 0.2

    def act(twin):
        piece = twin.net.layers[2][0]
        if how == 0:
            piece.weight = nn.Parameter(tensor.clone())
        elif how == 1:
            piece.register_parameter("weight", nn.Parameter(tensor.clone()))
        elif how == 2:
            torch.utils.swap_tensors(piece.weight, nn.Parameter(tensor.clone()))
        else:
            piece._parameters["weight"] = nn.Parameter(tensor.clone())
    return act


@action()
def without_bias(draw):
    x, _ = data(draw, 3, 5)

    def act(twin):
        piece = twin.net.layers[0][3]
        kept, piece.bias = piece.bias, None
        try:
            twin.seen = twin.net(x).detach()
        except Exception:
            piece.bias = kept
            raise
        piece.bias = nn.Parameter(torch.zeros(16))
    return act


@action()
def moving_average(draw):
    decay = draw.choice([None, 0.5])

    def act(twin):
        averages = torch.optim.swa_utils
        if twin.averaged is None:
            update = None if decay is None else averages.get_ema_multi_avg_fn(decay)
            twin.averaged = averages.AveragedModel(twin.net, multi_avg_fn=update)
        with attnd.torch.local_weights(twin.net, twin.averaged):
            twin.averaged.update_parameters(twin.net)
        twin.seen = numbers(twin.averaged.state_dict().values())
    return act


@action()
def weights_of_the_average(draw):
    x, _ = data(draw, 3, 5)

    def act(twin):
        if twin.averaged is not None:
            kept = copy.deepcopy(twin.net.state_dict())
            twin.net.load_state_dict(twin.averaged.module.state_dict())
            twin.seen = twin.net(x).detach()
            twin.net.load_state_dict(kept)
    return act


@action()
def move_net(draw):
    how, x = draw.randrange(5), data(draw, 2, 3)[0]

    def act(twin):
        try:
            if how == 0:
                twin.net.to("cpu").float()
            elif how == 1:
                twin.net.to(torch.bfloat16)
            elif how == 2:
                twin.net.layers[1].half()
            elif how == 3:
                twin.net.layers.double()
            else:
                twin.net.layers[0].to(memory_format=torch.contiguous_format)
        finally:
            twin.net.float()
        twin.seen = twin.net(x).detach()
    return act


@action()
def save_whole(draw):
    x, _ = data(draw, 2, 3)
    which = draw.randrange(3)

    def act(twin):
        file = io.BytesIO()
        torch.save([twin.net, twin.net.layers[1], twin.optimizers[0]][which], file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
        if which == 0:
            twin.seen = made(x).detach()
    return act


@action()
def go_on_with_a_copy(draw):
    kind = draw.choice(list(BUILDS))

    def act(twin):
        made = copy.deepcopy(twin.net)
        optimizers = [twin.make(BUILDS[kind], made.parameters())]
        twin.net, twin.optimizers, twin.schedules, twin.averaged = made, optimizers, [], None
    return act


@action()
def distill(draw):
    x, _ = data(draw, 3, 5)

    def act(twin):
        teacher = copy.deepcopy(twin.net).requires_grad_(False)
        for p in teacher.head.parameters():
            p.mul_(0.5)
        own = twin.net(x)
        (own - teacher(x)).square().mean().backward()
    return act


@action()
def train_two_nets(draw):
    (x, y), seed, kind = data(draw, 3, 5), draw.randrange(1 << 30), draw.choice(list(BUILDS))

    def act(twin):
        torch.manual_seed(seed)
        other = twin.make_net()
        one = twin.make(BUILDS[kind], [*twin.net.parameters(), *other.parameters()])
        for _ in range(2):
            one.zero_grad()
            (twin.net(x) + other(x) - y).square().mean().backward()
            one.step()
        twin.seen = numbers(other.state_dict().values())
        one.zero_grad()
        twin.optimizers, twin.schedules = [twin.make(BUILDS[kind], twin.net.parameters())], []
    return act


@action()
def autocast(draw):
    x, _ = data(draw, 3, 5)

    def act(twin):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            h = twin.net.inp(x)
            for layer in twin.net.layers:
                h = layer(h)
        twin.seen = h.float() * 0.01
    return act


@action()
def backward_of_nothing(draw):
    x, y = data(draw, 0, 5)
    steps = draw.random() < 0.5

    def act(twin):
        if steps:
            for one in twin.optimizers:
                one.zero_grad()
        (twin.net(x) - y).square().sum().backward()
        if steps:
            for one in twin.optimizers:
                one.step()
    return act


@action()
def calls_from_threads(draw):
    batches = [data(draw, *draw.choice(SHAPES)) for _ in range(3)]
    trains = draw.random() < 0.5

    def act(twin):
        found = [None] * len(batches)

        def call(n):
            try:
                with torch.set_grad_enabled(trains):
                    found[n] = twin.net(batches[n][0])
                if trains:
                    (found[n] - batches[n][1]).square().mean().backward()
            except Exception as error:
                found[n] = error
        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, Exception):
                raise one
        twin.seen = numbers(found)
    return act


@action()
def freeze_modules(draw):
    index, how = draw.choice([0, 1, None]), draw.random() < 0.6

    def act(twin):
        part = twin.net.layers if index is None else twin.net.layers[index]
        part.requires_grad_(how)
    return act


@action()
def parametrize(draw):
    x, _ = data(draw, 2, 3)
    how = draw.randrange(6)

    def act(twin):
        piece = dict(twin.net.named_modules())["layers.0"][3]
        kept, cls = dict(piece._parameters), type(piece)
        saved = {name: p.detach().clone() for name, p in kept.items() if p is not None and twin.optimizer != "server"}
        try:
            if how == 0:
                parametrizations.weight_norm(piece)
            elif how == 1:
                parametrizations.orthogonal(piece)
            elif how == 2:
                prune.l1_unstructured(piece, "weight", 0.3)
            elif how == 3:
                prune.custom_from_mask(piece, "weight", torch.eye(16, 24))
            elif how == 4:
                nn.utils.weight_norm(piece)
            else:
                nn.utils.spectral_norm(piece)
            twin.seen = twin.net(x).detach()
        except KeyError as error:  # prune's, while it takes back what it has begun
            raise TypeError(error) from error
        finally:
            piece.__class__ = cls
            piece.__dict__.pop("weight", None)
            piece._buffers.clear()
            piece._modules.clear()
            piece._parameters.clear()
            piece._parameters.update(kept)
            for name, tensor in saved.items():
                kept[name].data = tensor
            piece._forward_pre_hooks.clear()
    return act


@action()
def vector_of_weights(draw):
    lends, factor = draw.random() < 0.5, draw.choice([0.9, 1.1])

    def act(twin):
        def change():
            vector = nn.utils.parameters_to_vector(twin.net.layers.parameters())
            nn.utils.vector_to_parameters(vector.detach() * factor, twin.net.layers.parameters())
        if lends:
            with attnd.torch.local_weights(twin.net):
                change()
        else:
            change()
    return act


WRITES = [
    lambda p: torch._foreach_mul_([p], 0.9), lambda p: p.lerp_(torch.zeros_like(p), 0.1), lambda p: p.sub_(0.01),
    lambda p: p.detach().mul_(0.9), lambda p: p.view(-1).mul_(0.9), lambda p: torch.mul(p, 0.9, out=p),
    lambda p: p.t().mul_(0.9), lambda p: p.data.t().mul_(0.9), lambda p: p.clamp_(-0.1, 0.1),
    lambda p: torch._foreach_copy_([p], [torch.ones(p.shape) * 0.1]), lambda p: p.data.__setitem__(0, 0.0),
    lambda p: p.set_(torch.ones(p.shape) * 0.1), lambda p: torch._foreach_lerp_([p], [torch.zeros(p.shape)], 0.1),
    lambda p: p.untyped_storage().fill_(0), lambda p: p.data.copy_(torch.ones(p.shape) * 0.1),
    lambda p: p.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1)),
    lambda p: p.data.normal_(generator=torch.Generator().manual_seed(1)),
    lambda p: torch.add(p, 0.1, out=p), lambda p: p.data.resize_(p.shape).mul_(0.9), lambda p: p[0].zero_(),
    lambda p: p.index_fill_(0, torch.tensor([0]), 0.0), lambda p: p.swapaxes(0, 1).mul_(0.9),
    lambda p: torch.nn.init.trunc_normal_(p, generator=torch.Generator().manual_seed(1)),
    lambda p: torch.nn.init.eye_(p), lambda p: p.addmm_(torch.ones(24, 2), torch.ones(2, 16), alpha=0.01),
    lambda p: p.unbind()[0].zero_(), lambda p: torch.Tensor.mul_(p, 0.9), lambda p: torch.ops.aten.mul_(p, 0.9),
    lambda p: torch.ops.aten.copy_(p, torch.ones(24, 16) * 0.1), lambda p: p.as_subclass(torch.Tensor).mul_(0.9),
    lambda p: torch.no_grad()(torch.Tensor.zero_)(p), lambda p: p.__imul__(0.9), lambda p: p.requires_grad_().mul_(0.9)]


@action(2)
def write_a_weight(draw):
    write, word = draw.choice(WRITES), draw.choice(["layers.0.0.weight", "layers.2.0.weight"])
    x, _ = data(draw, 2, 3)

    def act(twin):
        with torch.no_grad():
            write(twin.net.get_parameter(word))
            twin.seen = twin.net(x)
    return act


@action()
def states_of_parts(draw):
    index = draw.randrange(3)

    def act(twin):
        layer = twin.net.layers[index]
        found = [layer.state_dict(), layer[0].state_dict(prefix="a."), twin.net.layers.state_dict(),
                 {name: attnd.torch.fetch(p) for name, p in layer.state_dict(keep_vars=True).items()}]
        twin.seen = numbers([float(len("".join(one))) for one in found] + [t for one in found for t in one.values()])
        layer[0].load_state_dict({name[2:]: tensor * 0.9 for name, tensor in found[1].items()})
    return act


class Encoder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=make) for _ in range(2)])

    def forward(self, x, **given):
        for layer in self.layers:
            x = layer(x, **given)
        return x


class Holder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers


@action()
def encoder_with_masks(draw):
    seed, batch_first = draw.randrange(1 << 30), draw.random() < 0.5
    kinds = [draw.randrange(6) for _ in range(3)]

    def act(twin):
        torch.manual_seed(seed)
        net = twin.place(Encoder(batch_first))
        one = twin.make(BUILDS["adamw"], net.parameters())
        generator, found = torch.Generator().manual_seed(seed), []
        for kind in kinds:
            x, goal = torch.randn(2, 2, 5, 16, generator=generator)
            padded = torch.arange(5) >= torch.tensor([[5], [3]])
            causal = nn.Transformer.generate_square_subsequent_mask(5)
            given = [{}, {"src_mask": causal}, {"src_mask": causal, "is_causal": True}, {"src_key_padding_mask": padded},
                     {"src_mask": torch.rand(5, 5, generator=generator) > 1.5 - torch.eye(5)},
                     {"src_mask": torch.ones(5, 5).triu(1).bool(), "src_key_padding_mask": padded}][kind]
            y = net(x if batch_first else x.transpose(0, 1).contiguous(), **given)
            y = y if batch_first else y.transpose(0, 1)
            one.zero_grad()
            (y * goal * ~padded[:, :, None]).mean().backward()
            one.step()
            found.append(y[~padded])
        twin.seen = numbers([*found, *net.state_dict().values()])
    return act


@action()
def decoder_with_memories(draw):
    seed, kinds, frozen = draw.randrange(1 << 30), [draw.randrange(4) for _ in range(3)], draw.random() < 0.3

    def act(twin):
        torch.manual_seed(seed)
        layers = nn.ModuleList([nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(3)])
        net = twin.place(Holder(layers))
        net.layers[0].requires_grad_(not frozen)
        x, memory = [one.requires_grad_() for one in torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(seed))]
        y = before = x
        for kind, layer in zip(kinds, net.layers):
            y, before = layer(y, [memory, y, x, before][kind]), y
        y.square().mean().backward()
        twin.seen = numbers([y, x.grad, *([] if memory.grad is None else [memory.grad]), *(
            attnd.torch.fetch(p.grad) for p in net.layers.parameters() if p.grad is not None)])
    return act


@action(0.3)
def restart_the_daemon(draw):
    return lambda twin: twin.restart()


@action()
def train_under_both(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        train(twin, x, y)
        with attnd.torch.local_weights(twin.net), torch.no_grad():
            for p in twin.net.layers.parameters():
                p.mul_(0.99)
        train(twin, x, y)
    return act
