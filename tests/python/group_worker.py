"""One rank of test_groups.py: trains as its arguments say, and writes what it has at the end.

    torchrun ... group_worker.py ADDRESS FILE CASE
"""
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import attnd.torch

WIDTH, STEPS, ROWS = 16, 6, 5


class Model(nn.Module):
    """An embedding and a head here, two encoder layers to be offloaded."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


def loss_of(model, number):
    """The loss of micro-batch `number` of the whole training; its dropout depends on the number alone."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (2, ROWS + 1), generator=generator)
    torch.manual_seed(1000 + number)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, 11), tokens[:, 1:].reshape(-1))


def stack_loss(stack, number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(2, ROWS, WIDTH, generator=generator)
    torch.manual_seed(1000 + number)
    return (stack(x) ** 2).sum() * 0.125


def train(model, optimizer, loss, each, rank, ranks, scaler=None, clip=None, steps=STEPS):
    """`each` micro-batches of this rank a step. Gives the norms that were clipped."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(each):
            value = loss(model, (step * each + k) * ranks + rank) / each
            (value if scaler is None else scaler.scale(value)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            norms.append(float(attnd.torch.clip_grad_norm_(model, clip)))
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return norms


def stack_of(dropout=0.0):
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout, batch_first=True)
    return nn.ModuleList([layer, nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout, batch_first=True)])


def run_stack(rank, ranks, group, each, dropout):
    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            layers = stack_of(dropout)
            if rank:
                with torch.no_grad():
                    for parameter in layers.parameters():
                        parameter.add_(1)  # rank 0's weights are all ranks'
            self.layers = attnd.torch.offload(layers, group=group, max_rows=2 * ROWS, kept_rows=2 * ROWS * each)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Run()
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)
    norms = train(model, optimizer, stack_loss, each, rank, ranks, scaler, clip=0.5)
    return {"state": model.state_dict(), "norms": norms, "moments": optimizer.state_dict()["state"]}


def run_ddp(rank, ranks, group, each):
    torch.manual_seed(5)
    model = Model(0.0)
    model.encoder.layers = attnd.torch.offload(model.encoder.layers, group=group, max_rows=2 * ROWS)
    trained = nn.parallel.DistributedDataParallel(model) if group is not None else model
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(trained.parameters(), lr=3e-3))
    norms = train(trained, optimizer, loss_of, each, rank, ranks, clip=0.5)
    return {"state": model.state_dict(), "norms": norms}


def checkpoint(path, rank, **parts):
    """Whole or not at all."""
    states = {name: part.state_dict() for name, part in parts.items()}  # of all ranks
    if rank == 0:
        torch.save(states, path + ".part")
        os.replace(path + ".part", path)


def run_restarts(rank, ranks, group, path):
    """From the last checkpoint on. In their first life rank 1 dies between its backward and the step."""
    torch.manual_seed(5)
    model = Model(0.0)
    model.encoder.layers = attnd.torch.offload(model.encoder.layers, group=group, max_rows=2 * ROWS,
                                               name="restarted" if group is not None else None)
    trained = nn.parallel.DistributedDataParallel(model) if group is not None else model
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(trained.parameters(), lr=3e-3))
    first = 0
    if group is not None and os.path.exists(path + ".checkpoint"):
        loaded = torch.load(path + ".checkpoint")
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        first = loaded["step"]["step"]
    for step in range(first, STEPS):
        optimizer.zero_grad()
        for n in range(rank, 2, ranks):
            (loss_of(trained, step * 2 + n) / (2 // ranks)).backward()
        if group is not None and rank == 1 and step == 3 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if group is not None:
            checkpoint(path + ".checkpoint", rank, model=model, optimizer=optimizer, step=Steps(step + 1))
    return {"state": model.state_dict(), "first": first}


class Steps:
    def __init__(self, step):
        self.step = step

    def state_dict(self):
        return {"step": self.step}


def run_fsdp(rank, ranks, group, _):
    """FSDP of what is here: the same losses as with DistributedDataParallel. A stack that is not left out is refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def losses(wrap):
        torch.manual_seed(5)
        model = Model(0.0)
        model.encoder.layers = attnd.torch.offload(model.encoder.layers, group=group, max_rows=2 * ROWS)
        trained = wrap(model, list(model.encoder.layers.parameters()))
        optimizer = attnd.torch.optimizer(torch.optim.AdamW(trained.parameters(), lr=3e-3))
        train(trained, optimizer, loss_of, 1, rank, ranks, steps=3)
        with torch.no_grad():
            return float(loss_of(trained, 100))

    cpu = torch.device("cpu")
    return {"ddp": losses(lambda model, _: nn.parallel.DistributedDataParallel(model)),
            "fsdp2": losses(lambda model, remote: fully_shard(model, ignored_params=set(remote))),
            "fsdp1": losses(lambda model, remote: FullyShardedDataParallel(
                model, ignored_states=remote, use_orig_params=True, device_id=cpu)),
            "refused": refused(lambda: losses(lambda model, _: fully_shard(model)))}


def run_loops(rank, ranks, group, address):
    """transformers' Trainer and Accelerate as they are, with layers here and on the daemon."""
    import accelerate
    import transformers

    import attnd.transformers
    torch.manual_seed(3)
    examples = [{"input_ids": row, "labels": row.sum() % 2} for row in torch.randint(0, 50, (16, 12))]

    def model_of(remote):
        torch.manual_seed(4)
        model = transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0))
        if not remote:
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        attnd.transformers.offload(model, address, group=group)
        return model, attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def run_trainer(remote):
        model, optimizer = model_of(remote)
        with tempfile.TemporaryDirectory() as folder:
            options = transformers.TrainingArguments(
                output_dir=folder, per_device_train_batch_size=4, max_steps=4, max_grad_norm=0.05, logging_steps=1,
                report_to=[], use_cpu=True, seed=3, disable_tqdm=True, save_strategy="no", ddp_backend="gloo")
            trainer = transformers.Trainer(model=model, args=options, train_dataset=examples, optimizers=(optimizer, None))
            trainer.train()
        return [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]

    def run_accelerate(remote):
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = model_of(remote)
        model, optimizer, data = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(examples, batch_size=4))
        found = []
        for batch in data:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            found.append([float(loss.detach()), float(norm)])
        return found

    return {name: [run(False), run(True)] for name, run in (("Trainer", run_trainer), ("Accelerate", run_accelerate))}


def refused(do):
    try:
        do()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def run_refusals(rank, group):
    found = {}
    torch.manual_seed(5)
    alone = Model(0.0)
    alone.encoder.layers = attnd.torch.offload(alone.encoder.layers)
    found["ddp"] = refused(lambda: nn.parallel.DistributedDataParallel(alone))
    found["local"] = refused(lambda: attnd.torch.offload(stack_of(), optimizer="local", group=group))

    def call(stack, batch):
        x = torch.randn(batch, ROWS, WIDTH)
        for layer in stack:
            x = layer(x)
        return x

    other = stack_of()
    other[1].linear1.weight.requires_grad_(rank != 1)
    found["layers"] = refused(lambda: call(attnd.torch.offload(other, group=group), 1))
    found["durability"] = refused(lambda: call(attnd.torch.offload(
        stack_of(), group=group, durability="host" if rank == 1 else "process"), 1))
    stack = attnd.torch.offload(stack_of(), group=group)
    attnd.torch.optimizer((torch.optim.SGD if rank == 1 else torch.optim.AdamW)(stack.parameters(), lr=0.1))
    found["optimizer"] = refused(lambda: call(stack, 1))
    stack = attnd.torch.offload(stack_of(), group=group, max_rows=ROWS)
    optimizer = attnd.torch.optimizer(torch.optim.SGD(stack.parameters(), lr=0.1 * (1 + rank)))
    call(stack, 1).sum().backward()
    found["rates"] = refused(optimizer.step)
    stack = attnd.torch.offload(stack_of(), group=group)
    call(stack, 1 + rank)  # the longest call of any rank decides
    call(stack, 2)
    found["rows"] = refused(lambda: call(stack, 3))
    return found


def run_counts(rank, group):
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True))
    stack = attnd.torch.offload(model, group=group, max_rows=2 * ROWS, kept_rows=4 * ROWS)
    optimizer = attnd.torch.optimizer(torch.optim.SGD(stack.parameters(), lr=0.1))
    for _ in range(1 + (rank == 0)):
        stack_loss(stack, rank).backward()
    return {"counts": refused(optimizer.step)}


def run_split(rank, group):
    stack = attnd.torch.offload(stack_of(), group=group)
    return {"split": refused(lambda: stack_loss(stack, rank))}


def main():
    addresses, path, case, *rest = sys.argv[1:]
    each = int(rest[0]) if rest else 1
    every = addresses.split(",")  # one a rank, or one for all
    address = every[int(os.environ.get("RANK", 0)) % len(every)]
    attnd.torch.connect(address, timeout=60)
    if case.startswith("alone_"):
        rank, ranks, group = 0, 1, None
    else:
        dist.init_process_group("gloo")
        rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    name = case.removeprefix("alone_")
    if name in ("stack", "dropout"):
        found = run_stack(rank, ranks, group, each, 0.25 if name == "dropout" else 0.0)
    elif name == "ddp":
        found = run_ddp(rank, ranks, group, each)
    elif name in ("restarts", "fsdp", "loops"):
        run = {"restarts": run_restarts, "fsdp": run_fsdp, "loops": run_loops}[name]
        found = run(rank, ranks, group, address if name == "loops" else path)
    else:
        found = {"refusals": run_refusals, "counts": run_counts, "split": run_split}[name](rank, group)
    torch.save(found, f"{path}.{rank}")
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
