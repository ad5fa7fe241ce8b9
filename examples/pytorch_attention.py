"""Trains a model of plain PyTorch whose attention runs on a daemon: one line sends it there.

    python3 examples/pytorch_attention.py      (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)
"""
import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch

LENGTH, WIDTH, HEADS, SYMBOLS = 32, 64, 4, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens) + self.places.weight))


attnd.torch.connect(wait_for_ready=True, timeout=120, precision="auto")
attnd.torch.replace()  # scaled_dot_product_attention is the daemon's from here on

torch.manual_seed(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(151):
    numbers = torch.randint(SYMBOLS, (16, LENGTH))
    loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.flip(1).flatten())  # the task: reverse the sequence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
