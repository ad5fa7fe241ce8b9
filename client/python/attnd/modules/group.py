"""One module that several processes train: what the ranks of a torch.distributed group agree on, and the module of one rank.

    attnd.torch.offload(layers, group=dist.group.WORLD)

Rank r of W numbers its micro-batches r, r + W, ...; the daemon adds them in the order of their numbers, so that the sum has
the bits of one worker that computes them in turn. Each rank calls the same step; the daemon does it once. Gradients are the
mean over ranks, as DistributedDataParallel's are. The group carries the module's name and, before each step, how many
micro-batches each rank has computed: no tensors.
"""
from __future__ import annotations

import atexit
import contextlib
import glob
import hashlib
import re
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, TypeVar

import torch
from torch import nn

from .._arrays import Array, ArrayLike
from ..client import Client
from ..errors import FailedPrecondition
from .module import GradientNorms, Module, ParameterStep, Registration, StepResult, StepValues
from .parameters import asked_by, stack_of

__all__ = ["PATIENCE", "GroupModule", "Ranks", "described", "digest", "mark_for_ddp", "patient"]

PATIENCE = 600.0  # seconds that a rank waits for others where no timeout was given
Result = TypeVar("Result")
_groups: List[Any] = []  # each that Ranks has used; they live until Python ends


class Ranks:
    """A process group, as the ranks of one module use it. It lives as long as Python does: its threads may want the
    interpreter while the end of its last user, such as DistributedDataParallel, joins them."""

    def __init__(self, group: Any) -> None:
        distributed: Any = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise FailedPrecondition("group: expected torch.distributed.init_process_group before offload(..., group=)")
        self._group, self._distributed = group, distributed
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise FailedPrecondition("group: expected a group that this process is in")
        _groups.append(group)
        atexit.unregister(_wait_for_gloo)
        atexit.register(_wait_for_gloo)

    def gather(self, value: Any) -> List[Any]:
        """Each rank's value, in the order of ranks."""
        found: List[Any] = [None] * self.size
        self._distributed.all_gather_object(found, value, group=self._group)
        return found

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises on every rank, naming who and what, unless all have the same values."""
        found = self.gather(dict(values))
        for rank, other in enumerate(found):
            for key, value in other.items():
                if value != found[0][key]:
                    raise FailedPrecondition(f"{what}: ranks of the group disagree: {key} is {found[0][key]} on rank 0 and "
                                             f"{value} on rank {rank}")

    def first(self, do: Callable[[], Result]) -> Optional[Result]:
        """On rank 0, after all ranks have come here; gives the result there. A failure is every rank's."""
        self.gather(None)
        failure: Optional[Exception] = None
        made: Optional[Result] = None
        if self.rank == 0:
            try:
                made = do()
            except Exception as error:  # noqa: BLE001  (told to all ranks, and raised here)
                failure = error
        told = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if told[0] is not None:
            raise FailedPrecondition(f"rank 0 of the group has failed: {told[0]}")
        return made


def _gloo_threads() -> List[List[str]]:
    """Asks the kernel for the state of each thread of Gloo groups, and how often it has run."""
    found = []
    for path in glob.glob("/proc/self/task/*/status"):
        with contextlib.suppress(OSError), open(path) as file:
            text = file.read()
            if text.startswith("Name:\tpt_gloo_runloop\n"):
                found.append(re.findall(r"^(?:State|Pid|\w*voluntary_ctxt_switches):.*", text, re.MULTILINE))
    return found


def _wait_for_gloo() -> None:
    """Returns when the threads of Gloo groups are idle, or after 30 s. Such a thread gives a collective's tensors back after
    those who wait for the collective go on; where that needs Python while Python ends, the process aborts
    (pytorch/pytorch#190489)."""
    is_idle, found, until = False, _gloo_threads(), time.monotonic() + 30
    while not is_idle and time.monotonic() < until:
        time.sleep(0.01)  # One that waited for the interpreter has it now, and runs or is about to.
        before, found = found, _gloo_threads()
        is_idle = found == before and all("State:\tS (sleeping)" in thread for thread in found)


class Needs(NamedTuple):
    """Ranks may differ in this part of a module's registration: the largest of all is taken."""

    max_rows: int
    kept_rows: int
    memory_rows: int

    def most(self, ranks: Ranks) -> Needs:
        """kept_rows: of all ranks together."""
        found = ranks.gather(tuple(self))
        return Needs(max(one[0] for one in found), sum(one[1] for one in found), max(one[2] for one in found))


class GroupModule(Module):
    """A module on a daemon, as one rank of a group has it."""

    @staticmethod
    def make(client: Client, ranks: Ranks, registration: Registration, timeout: Optional[float]) -> GroupModule:
        """Called by all ranks. Rank 0 registers it before the others; one that is there already has to be new."""
        taken = ranks.gather(registration.name)[0]  # a random name is rank 0's
        needs = Needs(registration.max_rows, registration.kept_rows, registration.max_memory_rows).most(ranks)
        wanted = registration._replace(name=taken, max_rows=needs.max_rows, kept_rows=needs.kept_rows,
                                       max_memory_rows=needs.memory_rows)
        ranks.agree("offload", described(wanted, ()))
        made = ranks.first(lambda: GroupModule(client, ranks, wanted, timeout))
        owner = ranks.gather(None if made is None else made.owner_epoch)[0]  # without it, a name opens nothing
        return made if made is not None else GroupModule(client, ranks, wanted._replace(owner_epoch=owner), timeout)

    def __init__(self, client: Client, ranks: Ranks, registration: Registration, timeout: Optional[float]) -> None:
        super().__init__(client, registration, 0, timeout)  # no log: the other ranks' calls are not in it
        self._ranks = ranks
        self._run("attnd_module_join", ranks.rank, ranks.size)

    def forward(self, x: ArrayLike, **options: Any) -> Any:
        return super().forward(x, **patient(options))

    def backward(self, dy: ArrayLike, activations: Any, **options: Any) -> Any:
        """Waits for the micro-batches before it, which other ranks may be computing."""
        return super().backward(dy, activations, **patient(options))

    def parameter_stats(self, *, all_norms: bool = False, timeout: Optional[float] = None) -> List[GradientNorms]:
        """Norms of the mean over ranks, once all ranks' micro-batches are there."""
        size = self._ranks.size
        found = super().parameter_stats(all_norms=all_norms, timeout=timeout or PATIENCE)
        return [GradientNorms(one.squared / (size * size), one.sum / size, one.largest / size) for one in found]

    def step_parameters(self, values: Sequence[StepValues], parameters: Sequence[ParameterStep], *,
                        timeout: Optional[float] = None) -> StepResult:
        mean = 1.0 / self._ranks.size
        return super().step_parameters(values, [one._replace(multiplier=one.multiplier * mean) for one in parameters],
                                       timeout=timeout)

    def _step(self, request: bytes, timeout: Optional[float]) -> StepResult:
        self._ranks.agree("step", {"the number of steps": self.sequence,
                                   "the number of backwards since the last step": self.micro_batches,
                                   "the digest of rates and multipliers": digest(request)})
        return super()._step(request, timeout or PATIENCE)

    def put_kinds(self, kinds: Mapping[str, Mapping[str, ArrayLike]], **options: Any) -> None:
        """Rank 0's tensors, for all. Where the daemon has lost the state these begin another one, of a later owner epoch:
        the ranks register with it, and what they have of the lost state is no longer theirs."""
        owner = self._ranks.gather(self._ranks.first(lambda: self._put(kinds, **options)))[0]
        if owner != self.owner_epoch:
            registration = self.registration._replace(owner_epoch=owner)
            GroupModule.__init__(self, self.client, self._ranks, registration, options.get("timeout"))
        elif self._ranks.rank != 0:
            self._run("attnd_module_follow", timeout=options.get("timeout"))
            self.weights_complete = True
        self._ranks.agree("offload", {"the state of the module, where they reach the same daemon,": self.sequence})

    def _put(self, kinds: Mapping[str, Mapping[str, ArrayLike]], **options: Any) -> int:
        """Rank 0's part. Gives the owner epoch of the state."""
        if not self._has_lost_state():
            super().put_kinds(kinds, **options)
            return self.owner_epoch
        self._run("attnd_module_join", 0, 1)  # one of several has to stay with the owner epoch
        try:
            super().put_kinds(kinds, **options)
            self.owner_epoch = int(self.status()["owner_epoch"])
        finally:
            self._run("attnd_module_join", 0, self._ranks.size)
        return self.owner_epoch

    def _has_lost_state(self) -> bool:
        try:
            self.status()
        except FailedPrecondition as error:
            if error.reason != "STATE_LOST":
                raise
            return True
        return False

    def get_kinds(self, kinds: Sequence[str], names: Optional[Iterable[str]] = None, *, timeout: Optional[float] = None
                  ) -> Dict[str, Dict[str, Array]]:
        found = super().get_kinds(kinds, names, timeout=timeout)
        for array in found.get("gradient", {}).values():
            array /= self._ranks.size
        return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def described(wanted: Registration, replicas: Sequence[str]) -> Dict[str, Any]:
    """Ranks have to agree on these before they register."""
    return {"the layers": digest(wanted.layout.serialize()),
            "the optimizer": str(wanted.optimizer), "durability": wanted.durability, "replicas": list(replicas)}


def patient(options: Dict[str, Any]) -> Dict[str, Any]:
    if options.get("timeout") is None:
        options["timeout"] = PATIENCE
    return options


# ---- DistributedDataParallel.

class _Ignored:
    """nn.Module._ddp_params_and_buffers_to_ignore, which DistributedDataParallel asks the model for: the parameters on
    daemons. What a user sets on a model comes before it, as this is no data descriptor."""

    def __get__(self, module: Any, owner: Any = None) -> List[str]:
        remote: List[str] = []
        for name, parameter in [] if module is None else module.named_parameters():
            found = stack_of(parameter)
            if found is None:
                continue
            if found[0].ranks is None and asked_by("torch.nn.parallel"):
                layers = name.removesuffix(found[1]).rstrip(".") or "the model"
                raise TypeError(f"DistributedDataParallel: {layers} was offloaded for one process, and the ranks' weights "
                                "would drift apart: give attnd.torch.offload(..., group=torch.distributed.group.WORLD), "
                                "or optimizer=\"local\"")
            remote.append(name)
        return remote


def mark_for_ddp() -> None:
    """From now on DistributedDataParallel leaves out parameters that are on daemons, or refuses the model."""
    kind: Any = nn.Module
    if "_ddp_params_and_buffers_to_ignore" not in vars(kind):
        kind._ddp_params_and_buffers_to_ignore = _Ignored()
