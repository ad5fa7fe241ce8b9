"""Trains an encoder whose attention becomes sparse: SPION's rule captures maps, builds patterns and switches to them.

    python3 examples/sparse_training.py        (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)
"""
import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch
from attnd.sparse import SparseAttention, SparseTraining, spion

LENGTH, WIDTH, HEADS, SYMBOLS = 64, 64, 2, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = SparseAttention()  # in place of scaled_dot_product_attention

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))


torch.manual_seed(1)
tokens, places, layers = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.Sequential(Layer(), Layer())
head = nn.Linear(WIDTH, SYMBOLS)
optimizer = torch.optim.AdamW(nn.ModuleList([tokens, places, layers, head]).parameters(), lr=3e-3)

attnd.torch.connect(wait_for_ready=True, timeout=120, precision="auto")
training = SparseTraining([layer.attention for layer in layers], spion(block=8, density=0.3, convolve=False), every=5,
                          warmup=100, on_switch=lambda report: print("switched to sparse attention"))
for step in range(201):
    numbers = torch.randint(SYMBOLS, (16, LENGTH))
    with training.step():
        answers = head(layers(tokens(numbers) + places.weight))
        loss = F.cross_entropy(answers.flatten(0, 1), numbers.flip(1).flatten())  # the task: reverse
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {training.phase}")
print(f"the switch came at step {training.switched_at}")
