"""Two workers on a slow link train one model, each on a daemon of its own: their weights meet only every 10 steps (DiLoCo,
https://arxiv.org/abs/2311.08105).

    torchrun --nproc-per-node 2 examples/slow_links.py    (ATTND_ADDRESS: a daemon for each rank, by commas)
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import attnd.torch

LENGTH, WIDTH, SYMBOLS, ROUNDS, STEPS = 12, 64, 16, 10, 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens):
        return self.head(self.encoder(self.tokens(tokens) + self.places.weight))


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
addresses = os.environ.get("ATTND_ADDRESS", "127.0.0.1:7070").split(",")
attnd.torch.connect(addresses[rank % len(addresses)], wait_for_ready=True, timeout=120, precision="f16")
torch.manual_seed(1)  # the same weights everywhere
model = Model()
model.encoder.layers = attnd.torch.offload(model.encoder.layers)
inner = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
shared = [attnd.torch.fetch(parameter) for parameter in model.parameters()]  # the weights that all ranks have
outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
torch.manual_seed(2 + rank)  # other samples everywhere
for n in range(ROUNDS):
    for _ in range(STEPS):
        numbers = torch.randint(SYMBOLS, (16, LENGTH))
        loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.flip(1).flatten())
        inner.zero_grad()
        loss.backward()
        inner.step()
    with attnd.torch.local_weights(model):  # parameters on the daemon are ordinary ones here
        for old, parameter in zip(shared, model.parameters()):
            old.grad = old - parameter.detach()  # the outer gradient: how far the steps went
            dist.all_reduce(old.grad)
            old.grad /= ranks
        outer.step()
        with torch.no_grad():
            for new, parameter in zip(shared, model.parameters()):
                parameter.copy_(new)
    if rank == 0:
        print(f"round {n}: loss {loss.item():.3f}")
weights = sum(attnd.torch.fetch(parameter).double().sum() for parameter in model.parameters()).item()
print(f"worker {rank}: the weights add up to {weights:.9f}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
