"""Copies of one module on several daemons, which the ranks of a torch.distributed group train as one.

    attnd.torch.offload(layers, group=dist.group.WORLD, replicas=["gpu1:7070", "gpu2:7070"])

Rank r uses replica r % R. Its daemon adds up the micro-batches of its ranks in their order, as group.GroupModule's does.
Whoever first looks at gradients, or steps, has the replicas' sums S0, S1, ... replaced by ((S0 + S1) + S2) + ... in float32.
Daemons with NCCL exchange them, GPU to GPU, when the first rank of each replica says so. Where one has none, or that fails,
these ranks fetch the sums, add them up through the process group, and put them back. All replicas then do the same step, so
that they stay equal bit by bit, whichever way it was.

A rank keeps its micro-batches until the step. Where its daemon has lost the module, it puts there the weights and moments
of another replica, and sends these micro-batches again before the exchange: other ranks of the replica may be waiting for
this rank's outputs by then, and their micro-batches come between its own.
"""
from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch

from .._arrays import Array, ArrayLike, Tensor
from ..client import Client
from ..errors import AttndError, FailedPrecondition, wrong
from .group import PATIENCE, Ranks, described, digest, patient
from .module import Activations, GradientNorms, Module, ParameterStep, Registration, StepResult, StepValues

__all__ = ["ReplicaModule", "Replicas"]

_RECOVERIES = 8  # of one call; each follows a restart of the daemon
_BUCKET = 4 << 20  # about so many numbers are summed at a time
_EXCHANGE_SECONDS = 60.0  # for which daemons wait for each other, beside the time that the bytes take
_SLOWEST = 64 << 20  # bytes a second of a link between daemons
_MOST_FAILURES = 3  # exchanges in turn; the next ones go through the workers
Answer = TypeVar("Answer")


class Replicas(Ranks):
    """A process group whose ranks are divided over daemons."""

    def __init__(self, group: Any, addresses: Sequence[str]) -> None:
        super().__init__(group)
        self.addresses, self.count = list(addresses), len(addresses)
        if self.size < self.count:
            raise wrong("replicas", f"at most one daemon for each of the {self.size} ranks of the group", self.count)
        self.replica, self.member = self.rank % self.count, self.rank // self.count
        self.members = len(range(self.replica, self.size, self.count))  # ranks of this replica
        self._leaders: Any = None

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its replica."""
        return bool(self.member == 0)

    def connect(self, like: Client) -> Client:
        """A client of this rank's replica."""
        return like._at(self.addresses[self.replica])

    def who(self, rank: int) -> str:
        return f"rank {rank}, of replica {rank % self.count} at {self.addresses[rank % self.count]}"

    def gather_leaders(self) -> None:
        """Makes the group of the first ranks of the replicas, which exchange tensors. All of them call it."""
        if self.leads and self._leaders is None:
            distributed = self._distributed
            ranks = [distributed.get_global_rank(self._group, rank) for rank in range(self.count)]
            self._leaders = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def sum(self, numbers: Array) -> None:
        """Replaces each first rank's numbers, a multiple of the replicas of them, by their sums, added in the order of
        replicas. Each rank adds up a part of them, so that it sends and receives 2 (R - 1) / R times their bytes."""
        most = -(-_BUCKET // self.count) * self.count
        received = torch.empty(min(most, numbers.size))
        for bucket in torch.split(torch.from_numpy(numbers), most):
            shares = received[:bucket.numel()]
            self._distributed.all_to_all_single(shares, bucket, group=self._leaders)
            first, *others = shares.view(self.count, -1)
            for one in others:
                first += one
            self._distributed.all_gather_into_tensor(bucket, first, group=self._leaders)

    def spread(self, array: Array) -> Array:
        """Rank 0's numbers, on each first rank."""
        tensor = torch.from_numpy(np.array(array, np.float32))
        self._distributed.broadcast(tensor, self._distributed.get_global_rank(self._group, 0), group=self._leaders)
        made: Array = tensor.numpy()
        return made


class Told(NamedTuple):
    """A rank tells the others this where all meet."""

    what: str  # they meet for
    backwards: int  # since the last step
    sequence: int  # of its replica, as it knows it
    value: Any  # or None
    error: str  # "": none
    reason: str


class ReplicaModule(Module):
    """One replica, as one rank of the group has it."""

    @staticmethod
    def make(client: Client, ranks: Replicas, registration: Registration, timeout: Optional[float], replay_bytes: int
             ) -> ReplicaModule:
        """Called by all ranks. The first rank of each replica registers it before the others. The limits are the same for
        all replicas."""
        name = ranks.gather(registration.name)[0]  # a random name is rank 0's
        needs = ranks.gather((registration.max_rows, registration.kept_rows, registration.max_memory_rows))
        kept = max(sum(one[1] for one in needs[replica::ranks.count]) for replica in range(ranks.count))
        wanted = registration._replace(max_rows=max(one[0] for one in needs), kept_rows=kept,
                                       max_memory_rows=max(one[2] for one in needs))
        ranks.agree("offload", described(wanted, ranks.addresses))
        wanted = wanted._replace(name=f"{name}.{ranks.replica}")
        ranks.gather_leaders()
        made, told, own_kind = None, "", ""
        if ranks.leads:
            try:
                made = ReplicaModule(client, ranks, wanted, timeout, replay_bytes)
                own_kind = _kind_of(made, timeout)
            except AttndError as error:
                told = f"{type(error).__name__}: {error}"
        epoch, version = (0, 0) if made is None else (made.owner_epoch, made.plan["nccl_version"])
        found = ranks.gather((told, epoch, own_kind, version))
        for rank, (failure, _, kind, _) in enumerate(found[:ranks.count]):
            if failure:
                raise FailedPrecondition(f"offload: {ranks.who(rank)}, has failed: {failure}")
            if kind != found[0][2]:
                raise FailedPrecondition("offload: expected replicas of one kind, since others round differently, got "
                                         f"{found[0][2]} at {ranks.addresses[0]} and {kind} at {ranks.addresses[rank]}")
        if made is None:  # an owner epoch is secret: without it, a name opens nothing
            epoch = found[ranks.replica][1]
            made = ReplicaModule(client, ranks, wanted._replace(owner_epoch=epoch), timeout, replay_bytes)
        made._peers = [wanted._replace(name=f"{name}.{replica}", owner_epoch=one[1])
                       for replica, one in enumerate(found[:ranks.count])]
        versions = {one[3] for one in found[:ranks.count]}
        made._is_direct = ranks.count > 1 and versions != {0} and len(versions) == 1
        return made

    def __init__(self, client: Client, ranks: Replicas, registration: Registration, timeout: Optional[float],
                 replay_bytes: int) -> None:
        super().__init__(client, registration, 0, timeout)  # no log: the other ranks' calls are not in it
        self._ranks, self._timeout = ranks, timeout
        self._peers: List[Registration] = []
        # ---- Micro-batches since the last step.
        self._added = 0
        self._kept: List[Tuple[Tensor, Activations]] = []  # dy, and the forward
        self._kept_bytes, self._most_bytes = 0, replay_bytes
        self._defers = False  # their gradients are not on the daemon, and are added before the exchange
        # ---- The exchange.
        self._current = 0  # the sequence of the replica's first rank, when all met last
        self._is_summed = False
        self._sums: Optional[Dict[str, Array]] = {}  # of a first rank, until the step; None: daemons alone have them
        self._numbers = np.empty(0, np.float32)  # end to end, where workers add them up; used in each step
        self._is_direct = False  # daemons exchange them
        self._group = b""  # of the daemons; of all ranks the same once they have met
        self._failures = 0  # of exchanges in turn
        self._run("attnd_module_join", ranks.member, ranks.members)

    @property
    def micro_batches(self) -> int:
        return self._added

    # ---- Calls of one rank.

    def forward(self, x: ArrayLike, **options: Any) -> Any:
        return self._recovering(lambda: super(ReplicaModule, self).forward(x, **patient(options)))

    def backward(self, dy: ArrayLike, activations: Any, *, weight_gradients: bool = True, **options: Any) -> Any:
        """Waits for the micro-batches before it, which other ranks of the replica may be computing."""
        if weight_gradients and self._is_summed:
            raise FailedPrecondition("backward: the replicas' gradients have been summed, since somebody looked at them: "
                                     "call step or zero_grad before")

        def call() -> Any:
            adds = weight_gradients and not self._defers
            return super(ReplicaModule, self).backward(dy, activations, weight_gradients=adds, **patient(options))
        found = self._recovering(call)
        if weight_gradients:
            self._keep(dy, activations)
        return found

    def get_kinds(self, kinds: Sequence[str], names: Optional[Iterable[str]] = None, *, timeout: Optional[float] = None
                  ) -> Dict[str, Dict[str, Array]]:
        """Gradients: called by all ranks, unless they have been summed."""
        if "gradient" in kinds:
            self._sum_gradients()
        asked = None if names is None else list(names)
        found: Dict[str, Dict[str, Array]] = self._recovering(
            lambda: super(ReplicaModule, self).get_kinds(kinds, asked, timeout=timeout))
        for array in found.get("gradient", {}).values():
            array /= self._ranks.size
        return found

    def _keep(self, dy: ArrayLike, activations: Activations) -> None:
        self._added += 1
        rows = self._array("dy", dy).copy()
        self._kept.append((Tensor(rows, self.layout.element), activations))
        self._kept_bytes += 2 * rows.nbytes  # x too
        if self._kept_bytes > self._most_bytes:
            self._kept.clear()

    def _check_kept(self) -> None:
        """On all ranks together, so that all of them can compute the step again."""
        if len(self._kept) < self._added:
            raise FailedPrecondition(
                f"replicas: {self._ranks.who(self._ranks.rank)}, has lost the gradients of this step, and replay_mib="
                f"{self._most_bytes >> 20} keeps less than its micro-batches: call zero_grad and compute the step again",
                reason="STATE_LOST", field="replicas")

    # ---- Calls of all ranks.

    def parameter_stats(self, *, all_norms: bool = False, timeout: Optional[float] = None) -> List[GradientNorms]:
        """Norms of the mean over all ranks, of which replica 0 computes the numbers for all."""
        self._sum_gradients()
        size = self._ranks.size

        def ask() -> Any:
            asked = super(ReplicaModule, self).parameter_stats(all_norms=all_norms, timeout=timeout or PATIENCE)
            return [tuple(one) for one in asked]
        found = self._meet("norms", (lambda: self._recovering(ask)) if self._ranks.rank == 0 else None)[0]
        return [GradientNorms(squared / (size * size), total / size, largest / size) for squared, total, largest in found]

    def step_parameters(self, values: Sequence[StepValues], parameters: Sequence[ParameterStep], *,
                        timeout: Optional[float] = None) -> StepResult:
        """A replica that has failed takes the state of one that has stepped."""
        mean = 1.0 / self._ranks.size
        scaled = [one._replace(multiplier=one.multiplier * mean) for one in parameters]
        # Until all are here a rank that recovers finds the others' weights and gradients as they were.
        numbers = digest(b"".join([*(one.encode() for one in values), *(one.encode() for one in scaled)]))
        self._meet(f"the step with rates and multipliers of digest {numbers}")
        self._sum_gradients()
        mine: Optional[StepResult] = None
        failure: Optional[AttndError] = None
        if self._ranks.leads:
            try:
                mine = super().step_parameters(values, scaled, timeout=timeout or PATIENCE)
            except AttndError as error:
                failure = error
        told = self._tell("step", None if mine is None else tuple(mine), failure)[:self._ranks.count]
        done = [replica for replica, one in enumerate(told) if one.value is not None]
        if not done:
            raise failure or FailedPrecondition(f"step: {self._ranks.who(0)}, has failed: {told[0].error}")
        self._current = told[self._ranks.replica].sequence
        if len(done) < self._ranks.count:
            self._meet("recovery", None if failure is None else lambda: self._take_state(done))
        self._begin()
        return StepResult(*told[done[0]].value)

    def discard(self, *, timeout: Optional[float] = None) -> StepResult:
        self._meet("zero_grad")
        self._meet("discarding", (lambda: self._recovering(self._discard)) if self._ranks.leads else None)
        self._begin()
        return StepResult(False, self.sequence, 0, 0, 0.0, True)

    def put_kinds(self, kinds: Mapping[str, Mapping[str, ArrayLike]], **options: Any) -> None:
        """Puts rank 0's tensors on all replicas."""
        self._meet(f"putting {', '.join(kinds)}")

        def put() -> None:
            every = {kind: {name: self._ranks.spread(np.asarray(array)) for name, array in tensors.items()}
                     for kind, tensors in kinds.items()}
            try:
                super(ReplicaModule, self).put_kinds(every, **options)
            except AttndError as error:
                if not _is_lost(error):
                    raise
                self._catch_up()  # all weights, as of a checkpoint, are put where there is nothing
                super(ReplicaModule, self).put_kinds(every, **options)
            self._discard()
        self._meet("writing", put if self._ranks.leads else None)
        self.weights_complete = True
        self._begin()

    # ---- The exchange.

    def _sum_gradients(self) -> None:
        """Replaces the gradients of each replica by the sum of all, once a step."""
        if self._is_summed:
            return
        mates = slice(self._ranks.replica, None, self._ranks.count)
        told = self._meet("the sum of gradients", lambda: (self._lacks(), self._group))
        lacks, groups = [one[0] for one in told], {one[1] for one in told[:self._ranks.count]}
        self._group = groups.pop() if len(groups) == 1 else b""
        for _ in range(_RECOVERIES):
            if any(lacks):
                self._group = b""
            while any(lacks):
                lacks = self._meet("completing", self._complete if any(lacks[mates]) else None)
            if self._sum_on_daemons():
                break
            lacks = self._meet("fetching", self._fetch if self._ranks.leads and self._added else None)
            if not any(lacks):
                self._sum_here()
                break
        else:
            raise FailedPrecondition(f"replicas: a daemon has lost its state {_RECOVERIES} times in a step: call zero_grad "
                                     "and compute the step again", reason="STATE_LOST", field="replicas")
        self._is_summed = True
        self._follow()

    def _lacks(self) -> bool:
        """Whether the daemon lacks micro-batches of this rank."""
        try:
            self.status()
        except AttndError as error:
            if not _is_lost(error):
                raise
            self._take_state()
        if self._defers:
            self._check_kept()
        return self._defers

    def _complete(self) -> bool:
        """Sends the micro-batches of this step, as all ranks of the replica do. Whether the daemon has lost them again."""
        if not self._defers:  # it has lost them since this rank has asked
            self._take_state()
            self._check_kept()
        try:
            for dy, activations in self._kept:
                super().backward(dy, activations, want_dx=False, timeout=PATIENCE)
        except AttndError as error:
            if not _is_lost(error):
                raise
            self._take_state()
            return True
        self._defers = False
        return False

    def _fetch(self) -> bool:
        """Whether the daemon has lost them."""
        try:
            expected, held = self._added * self._ranks.members, max(self.status()["micro_batches"], default=0)
            if held != expected:
                raise FailedPrecondition(f"micro_batches: expected {expected}, got {held}", reason="GRADIENT_INCOMPLETE")
            sums = self._room_for_sums()
            self._fill({"gradient": sums})
            self._sums = sums
        except AttndError as error:
            if not _is_lost(error):
                raise
            return True
        return False

    def _sum_here(self) -> None:
        """Adds up what has been fetched."""
        if self._ranks.leads and self._sums:
            self._ranks.sum(self._numbers)
        self._meet("putting", (lambda: self._recovering(self._put_sums)) if self._ranks.leads else None)

    def _room_for_sums(self) -> Dict[str, Array]:
        """Trained parameters' parts of _numbers."""
        shapes = {one.name: one.shape for one in self.layout.parameters if one.trained}
        sizes = [math.prod(shape) for shape in shapes.values()]
        if not self._numbers.size:
            self._numbers = np.zeros(-(-sum(sizes) // self._ranks.count) * self._ranks.count, np.float32)
        ends = np.cumsum(sizes, dtype=int)
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), np.split(self._numbers, ends))}

    def _sum_on_daemons(self) -> bool:
        """Whether all replicas have the sums. Otherwise all have their own gradients as before, or have lost them."""
        if not (self._is_direct and self._added):
            return False
        leaders, leads = slice(self._ranks.count), self._ranks.leads
        if not self._group:
            made = self._meet("a group of daemons", self._new_group if leads else None)[leaders]
            if any(error for _, error in made):
                return self._exchange_failed([error for _, error in made])
            self._group = made[0][0]
        errors = self._meet("the daemons' exchange", self._exchange if leads else None)[leaders]
        done = [replica for replica, error in enumerate(errors) if not error]
        if not done:
            return self._exchange_failed(errors)
        if len(done) < self._ranks.count:  # the others get what these have
            self._group = b""
            late = leads and self._ranks.replica not in done
            self._meet("handing over", (lambda: self._recovering(lambda: self._put_sums(done))) if late else None)
        self._failures = 0
        return True

    def _new_group(self) -> Tuple[bytes, str]:
        """Has the daemon take memory for sums. Gives the group, of replica 0, and what went wrong."""
        try:
            return self._sum_gradients_of(self._ranks.replica, self._ranks.count, b"", 0.0), ""
        except AttndError as error:
            return b"", f"{type(error).__name__}: {error}"

    def _exchange(self) -> str:
        """Gives what went wrong."""
        numbers = sum(math.prod(one.shape) for one in self.layout.parameters if one.trained)
        try:
            self._sum_gradients_of(self._ranks.replica, self._ranks.count, self._group,
                                   _EXCHANGE_SECONDS + 4 * numbers / _SLOWEST)
        except AttndError as error:
            return f"{type(error).__name__}: {error}"
        self._sums = None
        return ""

    def _exchange_failed(self, errors: Sequence[str]) -> bool:
        """Told to all ranks, each of which comes here."""
        self._group, self._failures = b"", self._failures + 1
        self._is_direct = self._failures < _MOST_FAILURES
        replica, error = next((replica, error) for replica, error in enumerate(errors) if error)
        if self._ranks.rank == 0:
            since = "" if self._is_direct else "; from now on they go through the workers"
            warnings.warn(f"attnd: the daemons of replicas could not exchange gradients{since}: {self._ranks.who(replica)}: "
                          f"{error}", RuntimeWarning, stacklevel=2)
        return False

    def _put_sums(self, done: Optional[Sequence[int]] = None) -> None:
        """Puts the sums in the place of the micro-batches. From here to the step, the first rank is the only one. done: the
        replicas whose daemons have them, where this rank has not."""
        if self._sums is None or done is not None:
            self._sums = self._sums_of_another(range(self._ranks.count) if done is None else done)
        self._discard()
        self._run("attnd_module_join", 0, 1)
        if self._sums:
            self.put_gradients(self._sums, timeout=PATIENCE)

    def _discard(self) -> None:
        """Clears gradients, also where there are none: a state taken from another replica has sequence 1, and none of those
        where a step begins, so that each rank notices that its daemon has lost the one that it knows."""
        super().discard(timeout=PATIENCE)

    def _begin(self) -> None:
        """The state has changed, and there are no gradients."""
        self._added, self._kept, self._kept_bytes, self._sums = 0, [], 0, {}
        self._is_summed = self._defers = False
        if self._ranks.leads:
            self._run("attnd_module_join", 0, self._ranks.members)
        self._follow()

    def _follow(self) -> None:
        """Goes on from the state that the replica's first rank has made."""
        if not self._ranks.leads:
            self._catch_up()
            if self.sequence != self._current:
                self._take_state()

    # ---- Recovery.

    def _recovering(self, do: Callable[[], Any]) -> Any:
        has_lost = False
        for left in reversed(range(_RECOVERIES)):
            try:
                if has_lost:
                    self._take_state()
                    if self._is_summed and self._ranks.leads:
                        self._put_sums()
                return do()
            except AttndError as error:
                has_lost = _is_lost(error)
                if not has_lost or not left:
                    raise

    def _catch_up(self) -> None:
        """Goes on from the state that the daemon has: what another rank has changed it to, or none."""
        ranks = self._ranks
        self._group = b""
        self._run("attnd_module_join", ranks.member, max(2, ranks.members))  # so that the owner epoch stays
        for is_last in (False, True):
            try:
                self._run("attnd_module_follow", timeout=self._timeout)
                break
            except AttndError as error:  # the first call after a loss says so; the second one begins anew
                if is_last or not _is_lost(error):
                    raise
        self._run("attnd_module_join", ranks.member, ranks.members)

    def _take_state(self, done: Optional[Sequence[int]] = None) -> None:
        """Puts the weights and moments of another replica. done: those that have stepped, where this one has failed to;
        else another rank of this replica may have put them already, or do so now: the daemon knows it as the same put."""
        self._catch_up()
        if done is not None or self.sequence == 0:
            kinds, step = self._state_of_another(range(self._ranks.count) if done is None else done)
            super().put_kinds(kinds, optimizer_step=step, complete=True, timeout=self._timeout)
            if done is not None:
                self._discard()
        self._defers = True

    def _state_of_another(self, replicas: Iterable[int]) -> Tuple[Dict[str, Dict[str, Array]], int]:
        optimizer = self.registration.optimizer

        def ask(peer: Module) -> Optional[Tuple[Dict[str, Dict[str, Array]], int]]:
            if not peer.weights_complete:
                return None
            state = peer.get_kinds(["weight", *(optimizer.moments if optimizer else ())], timeout=self._timeout)
            return state, int(peer.status(timeout=self._timeout)["optimizer_step"])
        return self._ask_another(replicas, ask, "weights")

    def _sums_of_another(self, replicas: Iterable[int]) -> Dict[str, Array]:
        def ask(peer: Module) -> Optional[Dict[str, Array]]:
            if not peer.status(timeout=self._timeout)["micro_batches"]:
                return None
            return peer.get_kinds(["gradient"], timeout=self._timeout)["gradient"]
        return self._ask_another(replicas, ask, "gradients")

    def _ask_another(self, replicas: Iterable[int], ask: Callable[[Module], Optional[Answer]], what: str) -> Answer:
        """The first answer of these replicas that is one."""
        failures = []
        for replica in replicas:
            if replica == self._ranks.replica:
                continue
            address = self._ranks.addresses[replica]
            try:
                with self.client._at(address) as client:
                    found = ask(Module(client, self._peers[replica], 0, self._timeout))
                if found is not None:
                    return found
                failures.append(f"{address} has no {what}")
            except AttndError as error:
                failures.append(f"{address}: {error}")
        raise FailedPrecondition(
            f"replicas: {self._ranks.who(self._ranks.rank)}, has lost its state, and no other replica gives its own "
            f"({'; '.join(failures) or 'there is none'}): go on from your checkpoint", reason="STATE_LOST", field="replicas")

    # ---- All ranks meet.

    def _meet(self, what: str, do: Optional[Callable[[], Any]] = None) -> List[Any]:
        """Gives the results of `do`, in the order of ranks. Raises on every rank where one has failed, or meets for
        something else."""
        value: Any = None
        failure: Optional[AttndError] = None
        try:
            value = None if do is None else do()
        except AttndError as error:
            failure = error
        found = self._tell(what, value, failure)
        if failure is not None:
            raise failure
        for rank, one in enumerate(found):
            if one.error:
                raise FailedPrecondition(f"{what}: {self._ranks.who(rank)}, has failed: {one.error}", reason=one.reason)
        self._current = found[self._ranks.replica].sequence
        return [one.value for one in found]

    def _tell(self, what: str, value: Any, failure: Optional[AttndError]) -> List[Told]:
        error = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reason = "" if failure is None else failure.reason
        found = [Told(*one) for one in self._ranks.gather((what, self._added, self.sequence, value, error, reason))]
        for rank, one in enumerate(found):
            for word, mine, first in (("the call of all ranks", one.what, found[0].what),
                                      ("the number of backwards since the last step", one.backwards, found[0].backwards)):
                if mine != first:
                    raise FailedPrecondition(f"replicas: ranks of the group disagree: {word} is {first} on rank 0 and "
                                             f"{mine} on rank {rank}")
        return found


def _kind_of(module: Module, timeout: Optional[float]) -> str:
    """Names what its bits depend on."""
    daemon = module.client.info(timeout=timeout)
    architectures = sorted({daemon.devices[device].architecture for device in module.plan["layer_device"]})
    return f"{module.plan['engine']} {'+'.join(architectures)} of attnd {daemon.version}"


def _is_lost(error: AttndError) -> bool:
    """Whether the daemon has nothing of the module's state, or of another time."""
    return error.reason in ("STATE_LOST", "WEIGHTS_INCOMPLETE") and error.field != "replicas"
