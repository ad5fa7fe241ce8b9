"""offload, optimizer, clip_grad_norm_, fetch, assign_, local_weights and local_gradients, as attnd.torch has them."""
from __future__ import annotations

from typing import Any, Literal, Optional, Sequence, Union

import torch

from .. import _checks
from .._connection import torch_connections
from .._operator_options import check_precision
from .._problem import Precision
from ..errors import brief, wrong
from .describe import other_method
from .group import Ranks, mark_for_ddp
from .local import assign_, fetch, local_gradients, local_weights
from .optimizer import RemoteOptimizer, clip_grad_norm_, take_replaced
from .owning import take_new
from .ranges import RemoteRanges, cut
from .replicas import Replicas
from .stack import RemoteStack, StackOptions, describe_apart, stack_of
from .watch import has_hooks

__all__ = ["assign_", "clip_grad_norm_", "fetch", "local_gradients", "local_weights", "offload", "optimizer"]


@brief
def offload(layers: torch.nn.Module, *, optimizer: Literal["server", "local"] = "server", name: Optional[str] = None,
            precision: Optional[Precision] = None, max_rows: Optional[int] = None, kept_rows: Optional[int] = None,
            durability: Literal["process", "host", "disk"] = "process", replay_mib: int = 512,
            snapshot_every: Optional[int] = None, timeout: Optional[float] = None, server: str = "",
            servers: Sequence[str] = (), group: Any = None, replicas: Sequence[str] = (), micro_batches: int = 1
            ) -> Union[RemoteStack, RemoteRanges]:
    """The layers of a ModuleList or Sequential, or one layer, as one module on a daemon: docs/MODULES.md.

        model.encoder.layers = attnd.torch.offload(model.encoder.layers)
        opt = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))

    optimizer: "server": weights and moments are there, and parameters here meta tensors; "local": gradients come back into
    .grad, and changed weights are sent before the next forward. name: under which the daemon knows it; None: a random one,
    given up with the stack. precision: None: float32 where the connection has none of its own. max_rows, kept_rows: rows of
    a call, and of all between forward and backward; None: the first call's, and twice as many. durability: what the daemon
    keeps of it through a restart. replay_mib: of calls kept here for what it does not. snapshot_every: after so many steps
    weights and moments are copied here, and earlier calls need not be kept; 0: never; None: never, with one warning when a
    restart of the daemon would lose the module. server: a connection's name; servers: several, which get consecutive layers
    each. micro_batches: each call is cut into so many parts, of which several are under way at a time: tensors of one travel
    while another is computed, and several servers compute at the same time.
    group: a torch.distributed group whose ranks train one module together, as DistributedDataParallel's do; replicas:
    beside it, addresses of daemons, each of which has a copy of the layers and the ranks r, r + len(replicas), ...; the
    connection's other options hold for them too: docs/FLEET.md.

    Raises TypeError for a layer that cannot be offloaded, naming why.
    """
    _checks.word("optimizer", optimizer, ("server", "local"), '"server" or "local"')
    for word, rows, least in (("max_rows", max_rows, 1), ("kept_rows", kept_rows, 0)):
        if rows is not None:
            _checks.integer(word, rows, least, 1 << 32)
    several = isinstance(layers, torch.nn.ModuleList) or (
        isinstance(layers, torch.nn.Sequential) and any(len(list(layer.children())) for layer in layers))
    if isinstance(layers, (RemoteStack, RemoteRanges)):
        raise TypeError("offload: expected layers that are here, got ones that are on a daemon already")
    if several:
        _refuse_more_than_a_list(layers)
    children = layers._modules.items() if several else [("0", layers)]
    named = [(name, layer) for name, layer in children if layer is not None]
    if servers and (server or not several or len(named) < len(servers)):
        raise wrong("servers", "names of connections, at most one a layer of a ModuleList or Sequential, and no server "
                    "beside them", list(servers))

    def options_of(server: str, name: Optional[str]) -> StackOptions:
        element = check_precision(precision or torch_connections.precision(server)) or "f32"
        return StackOptions(optimizer == "server", not several, name, element, max_rows, kept_rows, durability, replay_mib,
                            snapshot_every, timeout, micro_batches,
                            several and isinstance(layers, torch.nn.Sequential))
    _checks.integer("micro_batches", micro_batches, 1, 1 << 16)
    if micro_batches > 1 and (group is not None or optimizer == "local"):
        raise wrong("micro_batches", "1 with a group, whose ranks keep daemons busy, and with optimizer=\"local\"",
                    micro_batches)
    if replicas:
        _check_replicas(replicas, group, servers, durability)
        ranks: Optional[Ranks] = Replicas(group, replicas)
    else:
        ranks = None if group is None else Ranks(group)
    if ranks is not None and optimizer == "local":
        raise wrong("group", "None with optimizer=\"local\": DistributedDataParallel adds up gradients that come back",
                    group)
    if ranks is not None and snapshot_every:
        raise wrong("group", "None with snapshot_every: a rank has its own calls alone, so that a group goes on from its "
                    "checkpoint", group)
    mark_for_ddp()
    if not servers:
        client = torch_connections.client(server)
        if isinstance(ranks, Replicas):
            client = ranks.connect(client)
        return RemoteStack(named, client, options_of(server, name), ranks)
    clients = [torch_connections.client(server) for server in servers]
    describe_apart(named)  # refuses before anything changes
    ends = cut([layer for _, layer in named], len(servers))
    return RemoteRanges([
        RemoteStack(named[begin:end], client, options_of(server, name and f"{name}.{n}"), ranks)
        for n, (server, client, begin, end) in enumerate(zip(servers, clients, [0, *ends], ends))])


def _refuse_more_than_a_list(layers: torch.nn.Module) -> None:
    """A list may compute, or have, more than its layers, which would be lost."""
    other = other_method(layers)
    own = [*layers._parameters, *layers._buffers]
    what = f"a {other[0]} of its own" if other else "hooks" if has_hooks(layers) else own[0] if own else None
    if what is not None:
        raise TypeError(f"offload: expected a plain ModuleList or Sequential, got a {type(layers).__name__} with {what}, "
                        "which would be lost: give its layers, as in torch.nn.ModuleList(layers), and leave the rest in the "
                        "module around them")


def _check_replicas(replicas: Sequence[str], group: Any, servers: Sequence[str], durability: str) -> None:
    if isinstance(replicas, str) or not all(isinstance(one, str) for one in replicas):
        raise wrong("replicas", 'a list of addresses, such as ["gpu1:7070", "gpu2:7070"]', replicas)
    twice = sorted({one for one in replicas if replicas.count(one) > 1})
    if twice:
        raise wrong("replicas", "each daemon once", f"{', '.join(twice)} twice")
    if servers:
        raise wrong("replicas", "no servers beside it: servers= cuts one copy of the layers, replicas= makes several",
                    list(servers))
    if group is None:
        raise wrong("replicas", "group= beside it, whose ranks are divided over the replicas, such as "
                    "group=torch.distributed.group.WORLD", "group=None")
    if durability != "process":
        raise wrong("durability", '"process" with replicas: a daemon that has lost its state takes that of another one',
                    durability)


@brief
def optimizer(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, for parameters here and on daemons: its groups, rates and decays hold on both sides, schedulers and a
    GradScaler work with it. torch.optim.AdamW, Adam and SGD; itself where no parameter is remote."""
    take_new(parameter for group in inner.param_groups for parameter in group["params"])
    take_replaced(inner)
    remote = any(stack_of(parameter) is not None for group in inner.param_groups for parameter in group["params"])
    return RemoteOptimizer(inner) if remote else inner
