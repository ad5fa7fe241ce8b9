"""More that programs of training do to a net, as module_actions.py: graphs of autograd, hooks, copies and norms."""
import copy
import math

import torch
import torch.utils.checkpoint
from module_actions import BUILDS, SHAPES, action, data
from torch import nn

import attnd.torch


@action()
def backward_twice(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        loss = twin.loss(x, y)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
    return act


@action()
def backward_of_some(draw):
    x, y = data(draw, 2, 5)
    name = draw.choice(["inp.weight", "head.weight"])

    def act(twin):
        p = twin.net.get_parameter(name)
        if p.requires_grad:
            twin.loss(x, y).backward(inputs=[p])
    return act


@action()
def gradient_of_the_input(draw):
    x, y = data(draw, 2, 5)

    def act(twin):
        own = x.clone().requires_grad_()
        twin.seen, = torch.autograd.grad(twin.loss(own, y), own)
    return act


@action()
def cut_the_graph(draw):
    x, y = data(draw, 3, 5)
    at = draw.randrange(3)

    def act(twin):
        h = twin.net.inp(x)
        for n, layer in enumerate(twin.net.layers):
            h = layer(h.detach() if n == at else h)
        twin.loss_behind(h, y).backward()
    return act


@action()
def one_layer_twice(draw):
    x, y = data(draw, 3, 5)
    which = draw.randrange(3)

    def act(twin):
        layer = twin.net.layers[which]
        twin.loss_behind(layer(layer(twin.net.inp(x))), y).backward()
    return act


@action()
def layers_backwards(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        h = twin.net.inp(x)
        for layer in reversed(list(twin.net.layers)):
            h = layer(h)
        twin.loss_behind(h, y).backward()
    return act


@action()
def write_an_output(draw):
    x, y = data(draw, 3, 5)
    how = draw.randrange(3)

    def act(twin):
        h = twin.net.layers[0](twin.net.inp(x))
        if how == 0:
            h.add_(1.0)
        elif how == 1:
            h[0] = 0.0
        else:
            h = torch.relu_(h)
        twin.loss_behind(twin.net.layers[1](h), y).backward()
    return act


@action()
def checkpointed(draw):
    x, y = data(draw, 3, 5)
    reentrant = draw.random() < 0.5

    def act(twin):
        h = twin.net.inp(x)
        for layer in twin.net.layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=reentrant)
        twin.loss_behind(h, y).backward()
    return act


@action()
def hooks_of_tensors(draw):
    x, y = data(draw, 3, 5)
    at, factor = draw.randrange(3), draw.choice([0.0, 0.5, -2.0])

    def act(twin):
        h = twin.net.inp(x)
        for n, layer in enumerate(twin.net.layers):
            h = layer(h)
            if n == at and h.requires_grad:
                h.register_hook(lambda gradient: gradient * factor)
        twin.loss_behind(h, y).backward()
    return act


@action()
def hook_of_a_layer(draw):
    x, y = data(draw, 3, 5)
    at, before = draw.randrange(3), draw.random() < 0.5

    def act(twin):
        layer = twin.net.layers[at]
        if before:
            handle = layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        else:
            handle = layer.register_forward_hook(lambda module, inputs, output: output * 0.5)
        try:
            twin.loss(x, y).backward()
        finally:
            handle.remove()
    return act


@action()
def look_without_gradients(draw):
    x, _ = data(draw, *draw.choice(SHAPES))
    infers = draw.random() < 0.5

    def act(twin):
        with torch.inference_mode() if infers else torch.no_grad():
            found = twin.net(x)
        twin.seen = found.clone()
    return act


@action()
def average(draw):
    x, _ = data(draw, 2, 3)

    def act(twin):
        made = torch.optim.swa_utils.AveragedModel(twin.net)
        with torch.no_grad():
            twin.seen = made(x)
    return act


@action()
def forget_layers(draw):
    which = draw.randrange(3)

    def act(twin):
        for p in twin.net.layers[which].parameters():
            p.grad = None
    return act


@action()
def zero_between(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        loss = twin.loss(x, y)
        twin.net.zero_grad()
        loss.backward()
    return act


@action()
def total_norm(draw):
    order = draw.choice([2.0, 1.0, math.inf])

    def act(twin):
        found = [p.grad for p in twin.net.parameters() if p.grad is not None]
        if found:
            twin.seen = nn.utils.get_total_norm(found, norm_type=order)
    return act


@action()
def load_optimizers(draw):
    def act(twin):
        for one in twin.optimizers:
            one.load_state_dict(copy.deepcopy(one.state_dict()))
    return act


@action()
def change_one_group(draw):
    lr = draw.choice([0.0, 5e-3])

    def act(twin):
        twin.optimizers[-1].param_groups[-1]["lr"] = lr
    return act


@action()
def another_batch_first(draw):
    x, y = data(draw, 3, 5)
    other, _ = data(draw, 6, 7)  # 42 rows

    def act(twin):
        loss = twin.loss(x, y)
        twin.seen = twin.net(other).detach()
        loss.backward()
    return act


@action()
def initialize(draw):
    seed = draw.randrange(1 << 30)

    def act(twin):
        with attnd.torch.local_weights(twin.net):
            generator = torch.Generator().manual_seed(seed)
            for module in twin.net.layers[2].modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_normal_(module.weight, generator=generator)
                    nn.init.zeros_(module.bias)
    return act


@action()
def write_an_input(draw):
    x, y = data(draw, 3, 5)
    late = draw.random() < 0.5

    def act(twin):
        h = twin.net.inp(x).detach().clone()
        made = twin.net.layers[0](h)
        if not late:
            made = made + 0
        with torch.no_grad():
            h.add_(1.0)
        twin.seen = made.detach().clone()
    return act


@action()
def checkpoint_of_several(draw):
    x, y = data(draw, 3, 5)
    reentrant, end = draw.random() < 0.5, draw.choice([2, 3])

    def act(twin):
        def run(h):
            for layer in twin.net.layers[:end]:
                h = layer(h)
            return h
        h = torch.utils.checkpoint.checkpoint(run, twin.net.inp(x), use_reentrant=reentrant)
        twin.loss_behind(h, y).backward()
    return act


@action()
def kept_elsewhere(draw):
    x, y = data(draw, 3, 5)
    how = draw.randrange(3)

    def act(twin):
        with [torch.autograd.graph.save_on_cpu(), torch.autograd.detect_anomaly(check_nan=False),
              torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float())][how]:
            loss = twin.loss(x, y)
            loss.backward() if how == 1 else None
        if how == 0:
            loss.backward()
        elif how == 2:
            twin.seen = loss.detach()
    return act


@action()
def backward_of_two(draw):
    (x, y), (u, v) = data(draw, 3, 5), data(draw, 2, 2)

    def act(twin):
        one, two = twin.loss(x, y), twin.net(u)
        torch.autograd.backward([one, two], [torch.tensor(0.5), v * 0.1])
    return act


@action()
def gradient_penalty(draw):
    x, y = data(draw, 2, 3)

    def act(twin):
        own = x.clone().requires_grad_()
        gradient, = torch.autograd.grad(twin.loss(own, y), own, create_graph=True)
        (twin.loss(x, y) + gradient.square().sum()).backward()
    return act


@action()
def penalty(draw):
    x, y = data(draw, 2, 3)
    word = draw.choice(["head", "layers", ""])

    def act(twin):
        found = [p for n, p in twin.net.named_parameters() if word in n]
        (twin.loss(x, y) + 1e-2 * sum(p.square().sum() for p in found)).backward()
    return act


@action()
def backward_hook_of_a_layer(draw):
    x, y = data(draw, 3, 5)
    at, before = draw.randrange(3), draw.random() < 0.5

    def act(twin):
        layer = twin.net.layers[at]
        if before:
            handle = layer.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0.5,))
        else:
            handle = layer.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))
        try:
            twin.loss(x, y).backward()
        finally:
            handle.remove()
    return act


@action()
def two_encodings(draw):
    x, y = data(draw, 2, 3)

    def act(twin):
        twin.net.zero_grad()
        one, two = twin.net(x), twin.net(x * 0.5)
        ((one - y) ** 2 + one * two).mean().backward()
    return act


@action()
def copy_of_it(draw):
    x, y = data(draw, 3, 5)

    def act(twin):
        made = copy.deepcopy(twin.net)
        one = twin.make(BUILDS["sgd"], made.parameters())
        (made(x) - y).square().mean().backward()
        one.step()
        twin.seen = made(x).detach()
    return act
