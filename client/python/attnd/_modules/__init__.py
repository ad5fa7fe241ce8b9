"""Modules whose weights stay on a daemon: layouts of PyTorch's layers, stacks under autograd, optimizers on both sides.

attnd.modules is its interface on NumPy arrays, attnd.torch and attnd.transformers have those for their libraries.
"""
