"""Stacks of layers whose weights stay on a daemon, on NumPy arrays: forward, backward, step.

    layout = attnd.modules.Layout(width=64)                       # blocks of ops (attnd.modules.Block)
    h = attnd.register(layout, "127.0.0.1:7070", name="run-17", optimizer=attnd.AdamW())
    h.put(weights)                                                # {name: array}
    y, act = h.forward(x, keep=True)
    dx = h.backward(dy, act)                                      # the weights' gradients stay there
    h.step(lr=3e-4)
    weights = h.get()

A retried call is never applied twice; after a restart of the daemon the calls that it no longer knows are
replayed, bit for bit. attnd.torch.offload does all this for PyTorch's modules.
"""
from .layout import Block, Heads, Layout, Parameter, Rotary
from .module import (SGD, Activations, AdamW, Durability, GroupRates, Module, Optimizer, Registration, StepResult,
                     register)

__all__ = ["Activations", "AdamW", "Block", "Durability", "GroupRates", "Heads", "Layout", "Module", "Optimizer",
           "Parameter", "Registration", "Rotary", "SGD", "StepResult", "register"]
