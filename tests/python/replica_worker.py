"""One rank of test_replicas.py: trains as its arguments say, and writes what it has at the end.

    torchrun ... replica_worker.py ADDRESSES FILE CASE
"""
import contextlib
import dataclasses
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from group_worker import ROWS, WIDTH, Model, loss_of, refused, stack_loss, stack_of
from torch import nn

import attnd.modules.replicas
import attnd.torch

STEPS, EACH, RANKS, REPLICAS = 5, 2, int(os.environ.get("RANKS", "4")), 2
INFINITE = 1  # the step in which a gradient of the last rank is


class Stack(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = attnd.torch.offload(stack_of(0.25), max_rows=2 * ROWS, kept_rows=4 * ROWS, **options)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tools_of(model):
    """Biases have rates and a decay of their own."""
    every = dict(model.named_parameters())
    optimizer = attnd.torch.optimizer(torch.optim.AdamW([
        {"params": [one for name, one in every.items() if "bias" not in name]},
        {"params": [one for name, one in every.items() if "bias" in name], "lr": 1e-3, "weight_decay": 0.0}], lr=3e-3))
    return optimizer, torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)


def backward(model, scaler, step, k, rank):
    loss = stack_loss(model, (step * EACH + k) * RANKS + rank) / EACH
    factor = math.inf if (step, k, rank) == (INFINITE, 1, RANKS - 1) else 1.0
    scaler.scale(loss * factor).backward()


def evaluate(model):
    model.eval()
    with torch.no_grad():
        found = float(stack_loss(model, 1000))
    model.train()
    return found


def update(model, optimizer, scaler, step, found, reached=lambda *_: None):
    """Clips in odd steps alone, so that in even ones the scaler, or the step, looks at gradients first."""
    if step % 2:
        norm = attnd.torch.clip_grad_norm_(model, 0.5, scaler=scaler, optimizer=optimizer)
        found["norms"].append(repr(float(norm)))  # NaN is nothing's equal
        reached("clipped", step)
        if RANKS == REPLICAS:  # first ranks alone put sums where a daemon has lost them
            found["clipped"] = attnd.torch.fetch(next(model.parameters()).grad)
    scaler.step(optimizer)
    scaler.update()


def result_of(model, optimizer, found):
    return {"state": model.state_dict(), "moments": optimizer.state_dict()["state"], **found}


def train(rank, model, reached=lambda *_: None):
    optimizer, scaler = tools_of(model)
    found = {"norms": [], "losses": []}
    for step in range(STEPS):
        reached("begun", step)
        optimizer.zero_grad()
        if step == 3:  # one that is thrown away
            backward(model, scaler, 100, 0, rank)
            optimizer.zero_grad()
        for k in range(EACH):
            backward(model, scaler, step, k, rank)
            reached(f"computed {k}", step)
        found["losses"].append(evaluate(model))
        update(model, optimizer, scaler, step, found, reached)
    return result_of(model, optimizer, found)


def train_alone():
    """The same in one process: the sum of each replica's micro-batches, then the replicas' sums in their order."""
    model = Stack()
    optimizer, scaler = tools_of(model)
    found = {"norms": [], "losses": []}
    for step in range(STEPS):
        sums = []
        for replica in range(REPLICAS):
            optimizer.zero_grad()
            for k in range(EACH):
                for rank in range(replica, RANKS, REPLICAS):
                    backward(model, scaler, step, k, rank)
            sums.append([attnd.torch.fetch(parameter.grad) for parameter in model.parameters()])
        found["losses"].append(evaluate(model))
        with attnd.torch.local_gradients(model):
            for n, parameter in enumerate(model.parameters()):
                parameter.grad = (sums[0][n] + sums[1][n]) / RANKS
        update(model, optimizer, scaler, step, found)
    return result_of(model, optimizer, found)


def killer(rank, path, moments):
    """At each of the moments (rank, what, step) that rank has its daemon killed and started again."""
    def reached(what, step):
        if f"{rank} {what} {step}" in moments:
            with open(f"{path}.kill", "w") as file:
                file.write(str(rank % REPLICAS))
            while os.path.exists(f"{path}.kill"):
                time.sleep(0.01)
    return reached


def train_ddp(rank, replicas, reached):
    """Parameters here and on daemons; ranks wait for each other within backward."""
    torch.manual_seed(5)
    model = Model(0.0)
    model.encoder.layers = attnd.torch.offload(model.encoder.layers, group=dist.group.WORLD, replicas=replicas,
                                               max_rows=2 * ROWS)
    trained = nn.parallel.DistributedDataParallel(model)
    optimizer = attnd.torch.optimizer(torch.optim.SGD(trained.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        for k in range(EACH):
            (loss_of(trained, (step * EACH + k) * RANKS + rank) / EACH).backward()
            reached(f"computed {k}", step)
        optimizer.step()
    return {"state": model.state_dict()}


def run_refusals(rank, replicas):
    world = dist.group.WORLD
    found = {}

    def offload(**options):
        return attnd.torch.offload(stack_of(), max_rows=2 * ROWS, **options)

    for name, options in (("alone", dict(replicas=replicas)),
                          ("servers", dict(servers=["", ""], group=world, replicas=replicas)),
                          ("twice", dict(group=world, replicas=replicas[:1] * 2)),
                          ("many", dict(group=world, replicas=[*replicas, "a:1", "b:1"])),
                          ("word", dict(group=world, replicas=replicas[0])),
                          ("durability", dict(group=world, replicas=replicas, durability="host"))):
        found[name] = refused(lambda options=options: offload(**options))
    others = dict(replicas=replicas[::-1]) if rank == 1 else dict(replicas=replicas)
    found["order"] = refused(lambda: stack_loss(nn.Sequential(*offload(group=world, **others)), 0))
    asks = attnd.Client.info
    attnd.Client.info = lambda *given, **options: dataclasses.replace(asks(*given, **options), version=f"0.{rank}.0")
    found["versions"] = refused(lambda: stack_loss(nn.Sequential(*offload(group=world, replicas=replicas)), 0))
    attnd.Client.info = asks
    others = {} if rank == 1 else dict(replicas=replicas)
    found["none"] = refused(lambda: stack_loss(nn.Sequential(*offload(group=world, **others)), 0))
    stack = nn.Sequential(*offload(group=world, replicas=replicas))
    optimizer = attnd.torch.optimizer(torch.optim.SGD(stack.parameters(), lr=0.1 * (1 + rank)))
    stack_loss(stack, rank).backward()
    found["rates"] = refused(optimizer.step)
    stack = nn.Sequential(*offload(group=world, replicas=replicas, replay_mib=0))
    optimizer = attnd.torch.optimizer(torch.optim.SGD(stack.parameters(), lr=0.1))
    for _ in range(1 + (rank == 0)):
        stack_loss(stack, rank).backward()
    found["counts"] = refused(optimizer.step)
    return found


def run_losses(rank, replicas, reached):
    """Nothing here brings back micro-batches that were not kept, and the state of all replicas."""
    found = {}
    model = Stack(group=dist.group.WORLD, replicas=replicas, replay_mib=0)
    optimizer = attnd.torch.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(number):
        optimizer.zero_grad()
        stack_loss(model, number + rank).backward()
        reached("computed", number)
        optimizer.step()

    step(0)
    found["gradients"] = refused(lambda: step(2))  # of one replica
    step(3)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for killed in range(REPLICAS):
        if rank == killed:
            reached("saved", 4)
        dist.barrier()
    found["state"] = refused(lambda: step(4))
    optimizer.zero_grad()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step(4)
    return {**found, "saved": saved["model"], "end": model.state_dict()}


def main():
    addresses, path, case, *moments = sys.argv[1:]
    replicas = addresses.split(",")
    attnd.torch.connect(replicas[0], timeout=60, wait_for_ready=True, precision=os.environ.get("PRECISION"))
    attnd.modules.replicas._EXCHANGE_SECONDS = float(os.environ.get("EXCHANGE_SECONDS", "60"))
    if case == "alone":
        torch.save(train_alone(), f"{path}.0")
        return
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with contextlib.ExitStack() as ended:
        ended.callback(dist.destroy_process_group)
        reached = killer(rank, path, moments)
        if case == "train":
            found = train(rank, Stack(group=dist.group.WORLD, replicas=replicas), reached)
        elif case == "ddp":
            found = train_ddp(rank, replicas, reached)
        elif case == "losses":
            found = run_losses(rank, replicas, reached)
        else:
            found = run_refusals(rank, replicas)
        torch.save(found, f"{path}.{rank}")
        dist.barrier()


if __name__ == "__main__":
    main()
