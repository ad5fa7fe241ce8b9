"""Two workers train one model with DistributedDataParallel; the layers of both run on the same daemon.

    python3 examples/data_parallel.py          (ATTND_ADDRESS: the daemon's address; default 127.0.0.1:7070)

On several hosts start the body of `work` with torchrun instead of spawn; nothing else changes.
"""
import os

import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch

LENGTH, WIDTH, HEADS, SYMBOLS, WORKERS = 12, 64, 4, 16, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens):
        return self.head(self.encoder(self.tokens(tokens) + self.places.weight))


def work(rank, meeting):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORKERS)
    attnd.torch.connect(wait_for_ready=True, timeout=120)
    torch.manual_seed(1)  # the same weights everywhere
    model = Model()
    # "local": weights and gradients are PyTorch's own, so DDP averages them as ever.
    model.encoder.layers = attnd.torch.offload(model.encoder.layers, optimizer="local")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # other samples everywhere
    for step in range(101):
        numbers = torch.randint(SYMBOLS, (16, LENGTH))
        loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    weights = sum(parameter.double().sum() for parameter in model.parameters()).item()
    print(f"worker {rank}: the weights add up to {weights:.9f}\n", end="", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    meeting = f"file:///tmp/attnd-example-{os.getpid()}"
    torch.multiprocessing.spawn(work, (meeting,), WORKERS)
