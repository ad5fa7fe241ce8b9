"""CutRun: a call of a stack's layers in micro-batches, each some consecutive sequences of the call.

A line of each stack has its daemon compute one micro-batch after the other. Each is given on as soon as it is there: to the
stack of the next layers in forward, to that of the layers before in backward. So several daemons compute at the same time:

    stack a   forward 0   forward 1   forward 2   ...
    stack b               forward 0   forward 1   ...

Three are under way at each daemon, so that one is computed while tensors of another are sent and those of a third come back.

A micro-batch has the call's seed, and says how many sequences are before it, so that outputs are bit by bit those of an
uncut call; gradients of inputs too, but for float16, which has a power of two for each micro-batch. Gradients of weights are
those of as many calls, one micro-batch added after the other.
"""
from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest
from threading import Event
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from .. import _memory
from ..errors import FailedPrecondition
from .calls import StackCall
from .deferred import Lazy
from .module import Module
from .remote_call import Run

__all__ = ["CutRun", "Flow", "Line", "whole"]

RemoteStack = Any  # stack.RemoteStack
Made = Tuple[Optional[Tensor], ...]  # tensors of one micro-batch
_UNDER_WAY = 3


class Turn:
    """A backward's place among those of one call, in the order in which gradients are added, and powers of two chosen."""

    def __init__(self, module: Module, before: Optional[Turn]) -> None:
        self.number = module.reserve_turn()
        self._module, self._before = module, before
        self._has_chosen, self._is_over = Event(), Event()
        self._error: Optional[BaseException] = None

    @classmethod
    def of(cls, module: Module, count: int) -> List[Turn]:
        made: List[Turn] = []
        while len(made) < count:
            made.append(cls(module, made[-1] if made else None))
        return made

    def choose_power(self, stack: RemoteStack, largest: float) -> float:
        before = self._before
        if before is not None:
            before._has_chosen.wait()
        power: float = stack.choose_power(largest, True, None if before is None else before._finish)
        self._has_chosen.set()
        return power

    def _finish(self) -> None:
        """Waits until its gradients have been added."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: Optional[BaseException] = None) -> None:
        if error is not None:
            self._error = error
            self._module.give_up_turn(self.number)
        self._has_chosen.set()
        self._is_over.set()


class Line:
    """Does the calls of one stack, a few at a time, on threads of its own: while the daemon computes one, tensors of others
    are copied. They are added, and the module is changed, under the stack's lock. They begin in the order in which
    they were added. A call takes no lock, and waits for calls alone that were added before it, to this line or another: so
    none waits for ever."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_UNDER_WAY, "attnd-micro-batches")
        self._backwards: List[Future[Made]] = []  # that may not have ended

    def add(self, calls: Sequence[Callable[[], Made]], is_backward: bool = False, turns: Sequence[Turn] = ()
            ) -> List[Future[Made]]:
        """After one that has failed those behind it are not tried, and fail as it did. turns: of backwards that add
        gradients."""
        jobs: List[Future[Made]] = []

        def run(call: Callable[[], Made], before: Sequence[Future[Made]], turn: Optional[Turn]) -> Made:
            try:
                _finish([job for job in before if job.done()])
                with torch.no_grad():
                    made = call()
            except BaseException as error:
                if turn is not None:
                    turn.end(error)
                _finish(before)
                raise
            if turn is not None:
                turn.end()
            return made
        for call, turn in zip_longest(calls, turns):
            jobs.append(self._threads.submit(run, call, jobs[-_UNDER_WAY:], turn))
        if is_backward:
            self._backwards += jobs
        return jobs

    def finish(self) -> None:
        """Waits for the backwards, whether they succeed or not."""
        if self._backwards:
            wait(self._backwards)
            self._backwards = []


class Flow:
    """A tensor whose micro-batches, [sequences, length, width] each, are the nth tensors that jobs make."""

    def __init__(self, jobs: Sequence[Future[Made]], n: int, sizes: Sequence[int], batch_first: bool) -> None:
        self.sizes, self.batch_first = sizes, batch_first
        self._jobs, self._n = jobs, n
        self._whole: Optional[Tensor] = None

    @property
    def is_whole(self) -> bool:
        """Somebody has the whole tensor, and may have written it."""
        return self._whole is not None

    def part(self, index: int) -> Tensor:
        made = self._jobs[index].result()[self._n]
        assert made is not None
        return made

    def before_write(self) -> None:
        self.result()

    def result(self) -> Tensor:
        """The whole tensor, in its caller's dimensions."""
        if self._whole is None:
            wait(self._jobs)
            with torch.inference_mode(False), torch.no_grad():
                parts = [self.part(index) for index in range(len(self._jobs))]
                made = torch.cat(parts, out=_room(parts))
                self._whole = made if self.batch_first else made.transpose(0, 1).contiguous()
        return self._whole


def _room(parts: Sequence[Tensor]) -> Optional[Tensor]:
    """Memory of dead results, where tensors on this host lie one behind the other."""
    like, rows = parts[0], sum(len(part) for part in parts)
    if like.device.type != "cpu":
        return None
    bits = _memory.empty((rows, *like.shape[1:]), np.dtype(f"i{like.element_size()}"))
    return torch.from_numpy(bits).view(like.dtype)


def whole(value: Union[Flow, Tensor]) -> Tensor:
    return value.result() if isinstance(value, Flow) else value


def _finish(jobs: Sequence[Future[Made]]) -> None:
    """Raises what the first of them that has failed raised."""
    for job in jobs:
        job.result()


class CutRun(Run):
    """As Run. Its forward gives a Flow, its dx and d_memory are lazy ones of Flows."""

    def __init__(self, stack: RemoteStack, module: Module, versions: Any, call: StackCall, layers: Tuple[int, int]) -> None:
        nothing = torch.empty(0)
        super().__init__(stack, module, versions, call._replace(x=nothing, memory=None), layers)
        self.x_type, self.device = call.x.dtype, call.x.device
        self._memory: Any = None if call.memory is None else (call.memory.shape, call.memory.dtype, call.memory.device)
        self._sizes = call.split(stack._options.micro_batches)
        self._runs = [Run(stack, module, versions, one, layers) for one in call.cut(self._sizes)]

    def forward(self, x: Any, keep: bool, drops: bool, seed: int) -> Any:
        part = self._part_of(x)
        return self._flow(self.stack.line.add([partial(self._forward, run, part, n, keep, drops, seed)
                                               for n, run in enumerate(self._runs)]), 0)

    def backward(self, dy: Tensor) -> None:
        stack, trained = self.stack, self.check_backward(dy)
        flow = dy._pending if isinstance(dy, Lazy) else None
        part = self._part_of(flow if isinstance(flow, Flow) else dy)
        turns = Turn.of(self.module, len(self._runs)) if trained else []
        try:
            jobs = stack.line.add([partial(self._backward, run, part, n, trained, turn)
                                   for n, (run, turn) in enumerate(zip_longest(self._runs, turns))], True, turns)
        except BaseException as error:  # Ctrl-C: later backwards are not to wait for these
            for turn in turns:
                turn.end(error)
            raise
        if trained:
            stack.after_backward(stack.names_of(self.layers), is_empty=False)
        if self.wants_dx:
            self.dx = Lazy.of(self._flow(jobs, 0), dy.shape, self.x_type, self.device)
            if self._memory is not None:
                self.d_memory = Lazy.of(Flow(jobs, 1, self._sizes, True), *self._memory)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_finish, jobs))  # for whoever called backward(): what has failed is raised there

    def _forward(self, run: Run, part: Callable[[int], Tensor], n: int, keep: bool, drops: bool, seed: int) -> Made:
        return run.forward(part(n), keep, drops, seed),

    def _backward(self, run: Run, part: Callable[[int], Tensor], n: int, trained: bool, turn: Optional[Turn]) -> Made:
        if run.activations is None:
            raise FailedPrecondition("backward: expected a forward that has been computed, got one that has failed")
        run.wants_dx = self.wants_dx
        run.send_backward(part(n), trained, turn)
        made, run.dx, run.d_memory = (run.dx, run.d_memory), None, None
        return made

    def _flow(self, jobs: Sequence[Future[Made]], n: int) -> Flow:
        return Flow(jobs, n, self._sizes, self.call.batch_first)

    def _part_of(self, value: Any) -> Callable[[int], Tensor]:
        """Gives each micro-batch of a tensor, or of a Flow."""
        if isinstance(value, Flow) and not value.is_whole and (
                value.sizes, value.batch_first) == (self._sizes, self.call.batch_first):
            return value.part
        return torch.split(self.call.enter(whole(value)), self._sizes).__getitem__
