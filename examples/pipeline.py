"""Two workers train one model, each the layers of its own daemon: PyTorch's pipeline schedules pass micro-batches on, so
that both daemons compute at the same time.

    torchrun --nproc-per-node 2 examples/pipeline.py    (ATTND_ADDRESS: a daemon for each rank, by commas)
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import attnd.torch

LENGTH, WIDTH, SYMBOLS, BATCH, MICRO_BATCHES = 12, 64, 16, 32, 8


class Half(nn.Module):
    """This rank's layers; the first one's also embed, the last one's also tell the symbols apart."""

    def __init__(self, is_first, is_last):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.tokens = nn.Embedding(SYMBOLS, WIDTH) if is_first else None
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH)) if is_first else None
        self.head = nn.Linear(WIDTH, SYMBOLS) if is_last else None

    def forward(self, x):
        x = self.encoder(x if self.tokens is None else self.tokens(x) + self.places)
        return x if self.head is None else self.head(x)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
is_first, is_last = rank == 0, rank == ranks - 1
addresses = os.environ.get("ATTND_ADDRESS", "127.0.0.1:7070").split(",")
attnd.torch.connect(addresses[rank % len(addresses)], wait_for_ready=True, timeout=120)
torch.manual_seed(1 + rank)
half = Half(is_first, is_last)
# All micro-batches wait for their backward at some time on the first rank.
half.encoder.layers = attnd.torch.offload(half.encoder.layers, kept_rows=BATCH * LENGTH)
optimizer = attnd.torch.optimizer(torch.optim.AdamW(half.parameters(), lr=3e-3))
rows = BATCH // MICRO_BATCHES
between = torch.empty(rows, LENGTH, WIDTH, requires_grad=True)  # shapes alone are looked at
stage = PipelineStage(half, rank, ranks, torch.device("cpu"),
                      input_args=torch.zeros(rows, LENGTH, dtype=torch.int64) if is_first else between,
                      output_args=torch.empty(rows, LENGTH, SYMBOLS) if is_last else between)
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
torch.manual_seed(0)  # the same samples everywhere
for step in range(101):
    numbers, losses = torch.randint(SYMBOLS, (BATCH, LENGTH)), []
    optimizer.zero_grad()
    schedule.step(*([numbers] if is_first else []), target=numbers.flip(1) if is_last else None, losses=losses)
    optimizer.step()
    if is_last and step % 25 == 0:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
