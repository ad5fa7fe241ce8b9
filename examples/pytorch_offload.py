"""Trains a model whose encoder lives on a daemon: weights, gradients and the optimizer's state of the layers stay there.

    python3 examples/pytorch_offload.py [CHECKPOINT]   (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)

Saves to CHECKPOINT (default: reverse.pt in the folder for temporary files), and resumes from it where it is there.
"""
import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch

LENGTH, WIDTH, HEADS, SYMBOLS = 12, 64, 4, 16
path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "reverse.pt")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens):
        return self.head(self.encoder(self.tokens(tokens) + self.places.weight))


attnd.torch.connect(wait_for_ready=True, timeout=120, precision="f16")  # a V100 computes layers in 16 bits
torch.manual_seed(1)
model = Model()
model.encoder.layers = attnd.torch.offload(model.encoder.layers, snapshot_every=10)  # the first of two lines that differ
optimizer = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))  # the second
first = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
    print(f"resumed {path} after {first} steps")
for step in range(first, first + 100):
    numbers = torch.randint(SYMBOLS, (32, LENGTH))
    loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.flip(1).flatten())
    optimizer.zero_grad()
    loss.backward()
    attnd.torch.clip_grad_norm_(model, 1.0)
    optimizer.step()
    if (step + 1) % 25 == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + 100}, path)
print(f"saved {path}")
