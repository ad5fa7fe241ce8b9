"""A net here and its copy with layers on a daemon, for tests of what either does."""
import copy

import pytest
import torch
from module_actions import Net
from torch import nn

import attnd.torch

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
MODES = pytest.mark.parametrize("mode", ["server", "local"])


def pair(mode="server", **options):
    here = Net(2, **options)
    there = copy.deepcopy(here)
    there.layers = attnd.torch.offload(there.layers, optimizer=mode, max_rows=64)
    return here, there


def wrapped(net, optimizer):
    """The net's optimizer, wherever its layers are."""
    return optimizer if type(net.layers) is nn.ModuleList else attnd.torch.optimizer(optimizer)


def step(net, optimizer, x=X):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def same(here, there):
    for (name, one), other in zip(here.state_dict().items(), there.state_dict().values()):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")
