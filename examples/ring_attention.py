"""Ring attention: each worker has a piece of a long sequence, and a daemon computes its attention to one piece of keys after
the other. What each piece gives is merged by its log-sum-exp, which has a gradient too.

    torchrun --nproc-per-node 2 examples/ring_attention.py    (ATTND_ADDRESS: a daemon for each rank, by commas)
"""
import os

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F

import attnd.torch

BATCH, HEADS, LENGTH, DIM = 1, 2, 256, 32


def pass_on(tensor):
    """Gives the tensor of the rank before; this rank's goes to the next one. Gradients go the other way."""
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), tensor.shape[0]
    to, of = [[rows if peer == (rank + step) % ranks else 0 for peer in range(ranks)] for step in (1, -1)]
    return all_to_all_single(torch.empty_like(tensor), tensor.contiguous(), output_split_sizes=of, input_split_sizes=to)


def ring_attention(q, k, v, causal):
    """q, k, v: this rank's pieces [batch, heads, rows, dim]; those of all ranks, in their order, are the sequence."""
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), q.shape[2]
    outs, sums = [], []
    for step in range(ranks):
        piece = (rank - step) % ranks  # of the keys here; with causal those after this rank's queries are not visible
        visible = dict(causal=True, align=(rank - piece) * rows) if causal else {}
        out, lse = attnd.torch.attention(q, k, v, return_lse=True, **visible)
        outs.append(out)
        sums.append(lse)
        if step < ranks - 1:
            k, v = pass_on(torch.stack([k, v]))
    lse = torch.stack(sums)
    weights = torch.softmax(torch.stack(sums), 0)  # exp(lse of a piece - that of all)
    return (torch.stack(outs) * weights[..., None]).sum(0)


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
addresses = os.environ.get("ATTND_ADDRESS", "127.0.0.1:7070").split(",")
attnd.torch.connect(addresses[rank % len(addresses)], wait_for_ready=True, timeout=120, precision="auto")
torch.manual_seed(1)
whole = [torch.randn(BATCH, HEADS, LENGTH, DIM) for _ in range(4)]  # q, k, v, and the gradient of the output
for causal in (False, True):
    q, k, v = dense = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    expected.backward(whole[3])
    q, k, v = mine = [tensor.chunk(ranks, 2)[rank].clone().requires_grad_() for tensor in whole[:3]]
    out = ring_attention(q, k, v, causal)
    out.backward(whole[3].chunk(ranks, 2)[rank])
    pairs = [(out.detach(), expected.detach()), *((one.grad, other.grad) for one, other in zip(mine, dense))]
    error = max(float((one - other.chunk(ranks, 2)[rank]).abs().max()) for one, other in pairs)
    print(f"worker {rank}, causal {causal}: largest error of O, dQ, dK, dV: {error:.1e}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
