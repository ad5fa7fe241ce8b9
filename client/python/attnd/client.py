"""Client: attention on remote daemons as a function call, on NumPy arrays."""
from __future__ import annotations

import ctypes
import math
import os
import sys
import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, List, Literal, NamedTuple, Optional, Sequence, Tuple, Type, TypedDict, Union

import numpy as np

from . import _arrays, _checks, _native, _wire
from ._arrays import Array, ArrayLike, Tensor
from ._call import Call, CallOptions, Handle, Priority, Progress
from ._capture import Capture, Captured, NativeCapture
from ._pairing import pair, remember
from ._problem import (MAX_BATCH, MAX_HEAD_DIM, MAX_HEADS, MAX_LENGTH, BackwardInputs, Precision, Problem, memo_of, resolve,
                       resolve_absent, resolve_out, template_key)
from ._residual import NativeResidual, Residual
from ._version import __version__
from ._wire import address
from .errors import (AttndError, DeadlineExceeded, NotFound, Unauthenticated, Unavailable, Unimplemented, brief, wrong,
                     wrong_type)
from .masks.nodes import Mask, check_mask
from .results import (Device, ForwardCall, ForwardResult, Gradients, MaskOnDevice, MaskReport, Receipt,
                      ServerInfo)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._problem import Options


class TLS(NamedTuple):
    """PEM files. ca: authorities that may sign the server's certificate, None: the system's. cert, key: the client's
    own, for mutual TLS. server_name: expected in the server's certificate, None: the address's host."""

    ca: Optional[str] = None
    cert: Optional[str] = None
    key: Optional[str] = None
    server_name: Optional[str] = None


Fallback = Literal["error", "local"]
ConnectPrecision = Optional[Literal["f16", "bf16", "auto"]]


class ConnectOptions(TypedDict, total=False):
    """The arguments of connect that other modules' connect hand on."""

    tls: Union[None, bool, str, TLS]
    token: Optional[str]
    channels: int
    timeout: float
    retries: int
    fallback: Fallback
    wait_for_ready: bool
    merge_partial_results: bool
    proxy: Optional[str]


@brief
def connect(address: Union[None, str, Sequence[str]] = None, *, tls: Union[None, bool, str, TLS] = None,
            token: Optional[str] = None, channels: int = 8, timeout: float = 30.0, retries: int = 2,
            fallback: Fallback = "error", wait_for_ready: bool = False, merge_partial_results: bool = False,
            proxy: Optional[str] = None, precision: ConnectPrecision = None) -> Client:
    """A client of one daemon, or of several replicas. Connections are made when the first call needs them.

    address: "host:port", "unix:/run/attnd.sock", any gRPC target, or several of them. None: those in ATTND_ADDRESS, by
        commas, else 127.0.0.1:7070, with the token in the file that ATTND_TOKEN_FILE names, as attnctl does.
    tls: None (plaintext), True (system's authorities), the path of a CA file, or a TLS.
    token: sent as bearer token; needs TLS unless the address is loopback or a Unix socket.
    channels: connections per address, 1..64.
    timeout: seconds of a whole call that names none.
    retries: further attempts at each piece of a call after UNAVAILABLE.
    fallback: "error", or "local": when no server is available, compute here, by the CPU engine, and warn.
    wait_for_ready: wait for a connection until the timeout rather than failing when there is none; a training run
        then outlives a restart of its daemon.
    merge_partial_results: also cut calls of few heads by keys (forward) and by query rows (backward) and merge the
        parts here: exact to rounding, but not bitwise what the uncut call gives, as every other cut is.
    proxy: "http://host:port" of an HTTP proxy to connect through, or "environment": that of grpc_proxy, https_proxy or
        http_proxy, unless no_proxy names the address. None: no proxy, whatever the environment says.
    precision: "f16" or "bf16": that of calls with float32 arrays that name none (attnd.Options). "auto": asks the
        daemons now and takes "f16", with a warning, where one of them has no float32, as older ones on a Volta GPU.

    Raises InvalidArgument naming the argument, NotFound for a file; with "auto" also what info() does.
    """
    if address is None:
        address = (os.environ.get("ATTND_ADDRESS") or "127.0.0.1:7070").split(",")
        token = _token_of_environment() if token is None else token
    return Client(address, tls=tls, token=token, channels=channels, timeout=timeout, retries=retries,
                  fallback=fallback, wait_for_ready=wait_for_ready, merge_partial_results=merge_partial_results,
                  proxy=proxy, precision=precision)


class Client:
    """Attention on the daemons at some addresses. Made by attnd.connect.

    Any thread may call any method at the same time. After a fork the child's first call connects anew. Arrays are
    NumPy's (float16, float32, ml_dtypes.bfloat16) or anything with DLPack on the CPU; they are read in place, and no
    array is read or written after a call has returned or raised.
    """

    def __init__(self, address: Union[str, Sequence[str]], *, tls: Union[None, bool, str, TLS] = None,
                 token: Optional[str] = None, channels: int = 8, timeout: float = 30.0, retries: int = 2,
                 fallback: Fallback = "error", wait_for_ready: bool = False, merge_partial_results: bool = False,
                 proxy: Optional[str] = None, precision: ConnectPrecision = None) -> None:
        self._options: ConnectOptions = dict(
            tls=tls, token=token, channels=channels, timeout=timeout, retries=retries, fallback=fallback,
            wait_for_ready=wait_for_ready, merge_partial_results=merge_partial_results, proxy=proxy)
        self.addresses = _addresses(address)
        self.fallback = _checks.word("fallback", fallback, ("error", "local"), '"error" or "local"')
        self._native_options = _native.ClientOptions(
            addresses=(ctypes.c_char_p * len(self.addresses))(*[a.encode() for a in self.addresses]),
            address_count=len(self.addresses), channels_per_address=_checks.integer("channels", channels, 1, 64),
            bearer_token=None if token is None else _checks.ascii_text("token", token).encode(),
            timeout_seconds=_checks.seconds("timeout", timeout),
            max_attempts=1 + _checks.integer("retries", retries, 0, 100),
            wait_for_ready=_checks.flag("wait_for_ready", wait_for_ready),
            merge_partial_results=_checks.flag("merge_partial_results", merge_partial_results),
            proxy=None if proxy is None else _checks.ascii_text("proxy", proxy).encode(),
            **_tls_options(tls))
        self._current: Optional[Handle] = None
        self._closed = False
        self._handle()
        self.precision = self.choose_precision(precision)

    def _at(self, address: str) -> Client:
        """A client of another daemon, with this one's options but its precision."""
        return Client(address, **self._options)

    def choose_precision(self, precision: ConnectPrecision) -> Optional[Precision]:
        """Decides connect's argument of that name for these daemons: "f16", "bf16" or None."""
        if precision is None:
            return None
        _checks.word("precision", precision, ("f16", "bf16", "auto"), 'None, "f16", "bf16" or "auto"')
        if precision != "auto":
            return precision
        try:
            lacking = [a for index, a in enumerate(self.addresses) if "float32" not in self.info(index).features]
        except Unavailable as error:
            self._may_fall_back(error)
            lacking = []
        if not lacking:
            return None
        warnings.warn(f"attnd: the engine at {', '.join(lacking)} has no float32: float32 arrays are sent and computed as "
                      'float16 (precision="auto")', UserWarning, stacklevel=5)
        return "f16"

    @brief
    def forward(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool = True, keep: bool = False,
                bias_grad: bool = False, out: Optional[ArrayLike] = None, capture: Optional[Capture] = None,
                timeout: Optional[float] = None, priority: Priority = "normal", request_id: Optional[str] = None,
                progress: Optional[Callable[[Progress], None]] = None,
                **options: Unpack[Options]) -> ForwardResult:
        """O = softmax(scale·QKᵀ + bias, masked) V, and its log-sum-exp.

        q [batch, q_heads, q_len, dim], k [batch, kv_heads, kv_len, dim], v [batch, kv_heads, kv_len, v_dim] of one
        element type, in `layout`; kv_heads divides q_heads. `options` are attnd.Options.
        out: an array of O's shape and q's type that receives it; the result's `out` is then this array.
        keep: ask the servers to keep what backward needs; the result's `residual`, if they do, makes backward send dout
        alone. bias_grad: beside keep, whether backward will be asked for dbias.
        capture: an attnd.sparse.Capture: the result's `captured` is the averaged attention map. Never computed locally.
        timeout, priority ("low", "normal", "high"), request_id (for the server's logs) and progress (a function of
        attnd.Progress) are this call's.

        Raises InvalidArgument or InvalidType before a byte is sent, else what the server says (attnd.errors).
        """
        keep, return_lse = _checks.flag("keep", keep), _checks.flag("return_lse", return_lse)
        bias_grad, calls = _checks.flag("bias_grad", bias_grad), CallOptions(timeout, priority, request_id, progress)
        self._add_precision(q, options)
        if not (capture is None or isinstance(capture, Capture)):
            raise wrong_type("capture", "an attnd.sparse.Capture", capture)
        destination: Optional[Tensor] = None
        captured: Optional[Captured] = None
        receipt: Union[Receipt, Callable[[], Receipt]]
        residual: Optional[Residual] = None
        try:
            if out is None and not keep and capture is None:
                plan = memo_of(template_key(q, k, v, bias_grad, options)).get("plan")
                if plan is not None:
                    result = self._forward_as_planned(plan, q, k, v, return_lse, calls)
                    return remember(result, ForwardCall(q, k, v, options))
            problem = resolve(q, k, v, bias_grad, **options)
            destination = None if out is None else resolve_out(problem, "out", out, problem.o_shape)
            o, lse, receipt, residual, captured = self._forward(problem, destination, return_lse, calls, keep, bias_grad,
                                                                capture)
        except AttndError as error:
            if capture is not None:
                raise self._explain(error, timeout) from None
            self._may_fall_back(self._explain(error, timeout))
            problem = resolve(q, k, v, bias_grad, **options)
            from . import local
            o, lse, receipt = local.run_forward(problem, destination)
        given = out if isinstance(out, np.ndarray) else _arrays.give(Tensor(problem.in_callers_order(o.bits), o.element))
        result = ForwardResult(given, lse if return_lse else None, receipt, residual)
        result.captured = captured
        return remember(result, ForwardCall(q, k, v, options))

    @brief
    def backward(self, dout: ArrayLike, q: Union[ArrayLike, ForwardResult], k: Optional[ArrayLike] = None,
                 v: Optional[ArrayLike] = None, o: Optional[ArrayLike] = None, lse: Optional[ArrayLike] = None, *,
                 dlse: Optional[ArrayLike] = None, bias_grad: bool = False, residual: Optional[Residual] = None,
                 out: Optional[Tuple[ArrayLike, ArrayLike, ArrayLike]] = None,
                 timeout: Optional[float] = None, priority: Priority = "normal", request_id: Optional[str] = None,
                 progress: Optional[Callable[[Progress], None]] = None, **options: Unpack[Options]) -> Gradients:
        """dQ, dK, dV of a forward call: backward(dout, r) with its result r, or with its q, k, v, its options, and the
        o and lse that it gave.

        r: has q, k, v, o, lse, the options and, unless another is given, the residual. Options given beside it, or beside
        the very array r.lse, must be forward's: others raise InvalidArgument naming the option.
        dout: the gradient with respect to o, of its shape and type. dlse: with respect to lse, float32; None: zero.
        residual: that of the forward call, if there is one: what servers still hold is not sent again.
        bias_grad: also return dbias, float32 of the bias's shape, summed over broadcast dimensions.
        out: three arrays (dq, dk, dv) that receive the results. The rest as for forward.
        """
        if not (residual is None or isinstance(residual, Residual)):
            raise wrong_type("residual", "that of a forward call's result", residual)
        self._add_precision(q, options)
        problem, inputs, known = pair(dout, q, k, v, o, lse, dlse, _checks.flag("bias_grad", bias_grad), options)
        residual = known if residual is None else residual
        destinations = _gradient_destinations(problem, out)
        calls = CallOptions(timeout, priority, request_id, progress)
        receipt: Union[Receipt, Callable[[], Receipt]]
        try:
            found, d_bias, d_sink, receipt = self._backward(problem, inputs, destinations, bias_grad, calls, residual)
        except AttndError as error:
            self._may_fall_back(self._explain(error, timeout))
            from . import local
            found, d_bias, d_sink, receipt = local.run_backward(problem, inputs, destinations, bias_grad)
        dq, dk, dv = [_arrays.give(Tensor(problem.in_callers_order(t.bits), t.element)) for t in found]
        if out is not None:
            dq, dk, dv = [given if isinstance(given, np.ndarray) else made for given, made in zip(out, (dq, dk, dv))]
        return Gradients(dq, dk, dv, d_bias.reshape(problem.bias_shape) if bias_grad and d_bias is not None else None,
                         d_sink, receipt)

    @brief
    def empty(self, shape: Union[int, Sequence[int]], dtype: Any = np.float32) -> Array:
        """A new array, not initialised, in memory that this client shares with its daemon; torch.from_numpy takes it.

        With one address "unix:PATH" calls neither send nor copy arrays that lie there, inputs and out= alike. Elsewhere,
        and where nothing can be shared, it is an ordinary array. It may outlive the client; after a fork only one of
        the two processes may use it.
        """
        handle, lengths, kind = self._handle(), _checks.lengths("shape", shape), _checks.dtype("dtype", dtype)
        size = math.prod(lengths) * kind.itemsize
        if size == 0:
            return np.empty(lengths, kind)
        memory = handle.library.attnd_memory_new(handle.pointer, size) if size <= sys.maxsize else None
        if not memory:
            raise MemoryError(f"no memory for {size} bytes")
        data = handle.library.attnd_memory_data(memory)
        buffer: Any = (ctypes.c_ubyte * size).from_address(data)
        weakref.finalize(buffer, handle.library.attnd_memory_free, memory)
        array: Array = np.frombuffer(buffer, np.uint8).view(kind).reshape(lengths)
        return array

    @brief
    def info(self, index: int = 0, *, timeout: Optional[float] = None) -> ServerInfo:
        """Asks the daemon at addresses[index] what it is and can do."""
        index, handle = _checks.integer("index", index, 0, len(self.addresses) - 1), self._handle()
        call = Call(handle.library, CallOptions(timeout))
        try:
            call.run(handle.library.attnd_server_info, handle.pointer, index)
        except AttndError as error:
            raise self._explain(error, timeout, index) from None
        found = call.result()
        return ServerInfo(**{**found, "devices": [Device(**device) for device in found["devices"]]})

    @brief
    def compile_mask(self, mask: Mask, /, *, rows: int, keys: Optional[int] = None, batch: int = 1, q_heads: int = 1,
                     kv_heads: Optional[int] = None, head_dim: int = 64, index: int = 0, timeout: Optional[float] = None,
                     **options: Unpack[Options]) -> MaskReport:
        """Asks the daemon at addresses[index] about this mask in calls of these sizes: how many scores it shows, by which
        kernels and tiles each device runs it and why, its bytes, and how long it took to compile.

        The daemon then keeps it for such calls. Not needed: a call that brings its mask does the same.
        rows, keys: lengths of queries and keys, of all sequences together beside cu_seqlens; keys None: as rows. kv_heads
        None: as q_heads. options: those of the calls; without `precision` their arrays are taken as float32.
        """
        largest = {"rows": MAX_LENGTH, "keys": MAX_LENGTH, "batch": MAX_BATCH, "q_heads": MAX_HEADS, "kv_heads": MAX_HEADS,
                   "head_dim": MAX_HEAD_DIM}
        given = dict(rows=rows, keys=rows if keys is None else keys, batch=batch, q_heads=q_heads,
                     kv_heads=q_heads if kv_heads is None else kv_heads, head_dim=head_dim)
        size = {name: _checks.integer(name, value, 1, largest[name]) for name, value in given.items()}
        if options.get("cu_seqlens_q") is not None and size["batch"] != 1:
            raise wrong("batch", "1 beside cu_seqlens, which say how many sequences there are", size["batch"])
        if "mask" in options:
            raise wrong("mask", "given once, as the first argument", "two")
        options["mask"] = check_mask("mask", mask)
        element = _checks.word("precision", options.pop("precision", None) or self.precision or "f32",
                               tuple(_native.ELEMENTS), 'None, "f16" or "bf16"')
        problem = resolve_absent(size["batch"], (size["q_heads"], size["kv_heads"]), (size["rows"], size["keys"]),
                                 size["head_dim"], element, **options)
        structure, keep = _wire.structure_of(problem, problem.layout, False)
        index, handle = _checks.integer("index", index, 0, len(self.addresses) - 1), self._handle()
        call = Call(handle.library, CallOptions(timeout))
        try:
            call.run(handle.library.attnd_compile_mask, handle.pointer, index, ctypes.byref(structure))
        except AttndError as error:
            raise self._explain(error, timeout, index) from None
        del keep  # what the structure points to
        return _mask_report(call.result(), problem)

    @brief
    def serving(self, index: int = 0, *, timeout: Optional[float] = None) -> bool:
        """Whether the daemon at addresses[index] says that it is ready (grpc.health.v1)."""
        index, handle = _checks.integer("index", index, 0, len(self.addresses) - 1), self._handle()
        call, health = Call(handle.library, CallOptions(timeout)), ctypes.c_int32()
        try:
            call.run(handle.library.attnd_check_health, handle.pointer, index, ctypes.byref(health))
        except AttndError as error:
            raise self._explain(error, timeout, index) from None
        return bool(health.value)

    def close(self) -> None:
        """Disconnects once calls that still run have ended. Closing twice is fine."""
        with _native.lock():
            self._closed, self._current = True, None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise wrong_type("client", "connect() in each process, since connections cannot be pickled", self)

    def __repr__(self) -> str:
        return f"<attnd.Client of {', '.join(self.addresses)}{' (closed)' if self._closed else ''}>"

    def _handle(self) -> Handle:
        with _native.lock():
            if self._closed:
                raise wrong("client", "an open client", "one that was closed")
            if self._current is None or self._current.generation != _native.generation():
                self._current = Handle(self._native_options)
            return self._current

    def _add_precision(self, q: object, options: Options) -> None:
        """The client's own, for float32 arrays of a call that names none."""
        if self.precision is None or options.get("precision") is not None or isinstance(q, ForwardResult):
            return
        if _arrays.take("q", q).element == "f32":
            options["precision"] = self.precision

    def _explain(self, error: AttndError, timeout: Optional[float], asked: Optional[int] = None) -> AttndError:
        """The error with what to do, where the server or gRPC cannot say it in Python's words. asked: the index of the
        only address that the call was for."""
        where = ", ".join(self.addresses) if asked is None else self.addresses[asked]
        tls = "with" if self._native_options.use_tls else "without"
        if isinstance(error, Unavailable) and not error.reason:
            cure = "Leave out tls= if it is without" if self._native_options.use_tls else "Pass tls= if it has TLS"
            if self._native_options.use_tls and not self._native_options.tls_certificate_file:
                cure += ", or pass tls=attnd.TLS(ca, cert, key) if it asks for a certificate"
            return Unavailable(f"no attnd server at {where}: {error}; is attnd running there, {tls} TLS? {cure}",
                               reason="UNREACHABLE", retry_after=error.retry_after)
        if isinstance(error, DeadlineExceeded) and not error.reason:
            seconds = self._native_options.timeout_seconds if timeout is None else timeout
            return DeadlineExceeded(f"no answer from {where} within {seconds:g} s: {error}; if attnd is running there, "
                                    f"{tls} TLS, and is merely slow, give the call a longer timeout", reason="TIMEOUT")
        if isinstance(error, Unauthenticated):
            return Unauthenticated(f"{where} requires a token that it knows: {error}; give one by "
                                   "connect(token=...)", reason=error.reason, metadata=error.metadata)
        if isinstance(error, Unimplemented) and not error.reason:
            return Unimplemented(f"the server at {where} does not know this call: it is another program, or an attnd of "
                                 f"another version than this client's {__version__}, which should be its own ({error})",
                                 reason="UNKNOWN_CALL")
        if error.reason == "UNKNOWN_FIELD":
            return Unimplemented(f"the server at {where} is an older attnd than this client ({__version__}) and cannot do "
                                 f"what was asked: update it, or install the wheel of its version ({error})",
                                 reason=error.reason, metadata=error.metadata)
        return error

    def _may_fall_back(self, error: AttndError) -> None:
        """Raises the error unless the call is to be computed here instead."""
        if self.fallback != "local" or not isinstance(error, Unavailable):
            try:
                raise error from None
            finally:
                del error  # a cycle through this frame would hold the call's arrays
        warnings.warn(f"attnd: no server is available ({error}); computing locally", RuntimeWarning, stacklevel=4)

    def _forward(self, problem: Problem, callers: Optional[Tensor], return_lse: bool, calls: CallOptions, keep: bool,
                 bias_grad: bool, capture: Optional[Capture]
                 ) -> Tuple[Tensor, Optional[Array], Callable[[], Receipt], Optional[Residual], Optional[Captured]]:
        handle, buffers = self._handle(), _wire.ForwardBuffers(problem, callers, return_lse, bias_grad)
        kept = NativeResidual(handle.library) if keep else None  # before the call: frees what an interrupted one left
        if kept is not None:
            buffers.tensors.keep = ctypes.addressof(kept.pointer)
        wished = None if capture is None else NativeCapture(capture, problem.q_len, problem.kv_len, handle)
        if wished is not None:
            buffers.tensors.capture = ctypes.addressof(wished.structure)
        call = Call(handle.library, calls)
        call.run(handle.library.attnd_forward, handle.pointer, ctypes.byref(buffers.packed.problem),
                 ctypes.byref(buffers.tensors))
        _wire.remember(problem, buffers.wire, buffers.packed)
        residual = Residual(kept, buffers.wire) if kept is not None and kept.pointer else None
        captured = None if wished is None else wished.result(call.result()["captured"])
        return buffers.finish(), buffers.lse, call.receipt, residual, captured

    def _forward_as_planned(self, plan: _wire.Plan, q: Any, k: Any, v: Any, return_lse: bool, calls: CallOptions
                            ) -> ForwardResult:
        handle = self._handle()
        o = np.empty(plan.o_shape, plan.o_dtype)
        lse = np.empty(plan.lse_shape, np.float32) if return_lse else None
        tensors = _native.ForwardTensors.of(address(q), address(k), address(v), None, None, address(o), address(lse))
        call = Call(handle.library, calls)
        call.run(handle.library.attnd_forward, handle.pointer, ctypes.byref(plan.structure), ctypes.byref(tensors))
        return ForwardResult(o if plan.o_axes is None else o.transpose(plan.o_axes), lse, call.receipt)

    def _backward(self, problem: Problem, inputs: BackwardInputs, callers: Sequence[Optional[Tensor]], bias_grad: bool,
                  calls: CallOptions, residual: Optional[Residual]
                  ) -> Tuple[List[Tensor], Optional[Array], Optional[Array], Callable[[], Receipt]]:
        handle, wire = self._handle(), None
        kept = None if residual is None else residual.native()
        if residual is not None and kept is not None and len(residual.wire.axes) == problem.q.bits.ndim:
            wire = residual.wire  # the servers hold this layout
        buffers = _wire.BackwardBuffers(problem, inputs, callers, bias_grad, wire)
        if kept is not None:
            buffers.tensors.residual = kept.pointer.value
        call = Call(handle.library, calls)
        call.run(handle.library.attnd_backward, handle.pointer, ctypes.byref(buffers.packed.problem),
                 ctypes.byref(buffers.tensors))
        return buffers.finish(), buffers.d_bias, buffers.d_sink, call.receipt


def _mask_report(found: Any, problem: Problem) -> MaskReport:
    devices = [MaskOnDevice(compile_seconds=1e-9 * device.pop("compile_nanoseconds"), **device)
               for device in found["devices"]]
    return MaskReport(id=found["id"], scores=math.prod(problem.mask_sizes), nnz=found["visible"],
                      empty_rows=found["empty_rows"], bytes_held=found["bytes_held"], devices=devices)


def _gradient_destinations(problem: Problem, out: Optional[Tuple[object, object, object]]
                           ) -> Sequence[Optional[Tensor]]:
    if out is None:
        return [None, None, None]
    if not isinstance(out, (tuple, list)) or len(out) != 3:
        raise wrong_type("out", "three arrays (dq, dk, dv)", out)
    found: List[Tensor] = [resolve_out(problem, f"out[{n}]", given, tensor.bits.shape)
             for n, (given, tensor) in enumerate(zip(out, (problem.q, problem.k, problem.v)))]
    for n, m in ((1, 0), (2, 0), (2, 1)):
        if _overlap(found[n].bits, found[m].bits):
            raise wrong(f"out[{n}]", f"memory of its own, not out[{m}]'s", "an array that overlaps it")
    return found


def _overlap(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=1000)  # type: ignore[arg-type]
    except RuntimeError:  # too hard to tell: interleaved in some way
        return False


def _addresses(address: Union[str, Sequence[str]]) -> List[str]:
    given = [address] if isinstance(address, str) else list(address) if isinstance(address, (list, tuple)) else None
    if given is None:
        raise wrong_type("address", 'a string such as "127.0.0.1:7070", or several', address)
    if not given:
        raise wrong("address", "at least one", "none")
    for one in given:
        if not isinstance(one, str):
            raise wrong_type("address", 'a string such as "127.0.0.1:7070"', one)
        _checks.ascii_text("address", one)  # the library checks the rest
    return given


def _token_of_environment() -> Optional[str]:
    path = os.environ.get("ATTND_TOKEN_FILE")
    if not path:
        return None
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except OSError as error:
        raise NotFound(f"ATTND_TOKEN_FILE: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise wrong("ATTND_TOKEN_FILE", "printable ASCII", f"other bytes in {path}") from None
    if not token:
        raise wrong("ATTND_TOKEN_FILE", "a token", f"none in {path}")
    return token


def _tls_options(tls: Union[None, bool, str, TLS]) -> Any:
    if tls is None or tls is False:
        return {}
    if isinstance(tls, (str, os.PathLike)):
        tls = TLS(ca=os.fspath(tls))
    if tls is True:
        tls = TLS()
    if not isinstance(tls, TLS):
        raise wrong_type("tls", "None, True, the path of a CA file, or attnd.TLS(...)", tls)
    if (tls.cert is None) != (tls.key is None):
        raise wrong("tls", "cert and key together", "one of them")
    for part in tls:
        if not (part is None or isinstance(part, (str, os.PathLike))):
            raise wrong_type("tls", "paths of files, and server_name, as strings", part)
    _check_pem(tls)
    paths = {"tls_ca_file": tls.ca, "tls_certificate_file": tls.cert, "tls_key_file": tls.key,
             "tls_server_name": tls.server_name}
    return {"use_tls": 1, **{name: None if path is None else os.fsencode(path) for name, path in paths.items()}}


def _check_pem(tls: TLS) -> None:
    """Checks that the files exist: gRPC's own error for a bad file is that of an unreachable server."""
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.ca is not None and os.path.isfile(tls.ca):
            context.load_verify_locations(tls.ca)
        if tls.cert is not None and tls.key is not None and os.path.isfile(tls.cert) and os.path.isfile(tls.key):
            context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise wrong("tls", "PEM files: certificates, and a key that is the certificate's and not encrypted",
                    f"{', '.join(path for path in tls[:3] if path is not None)} ({error})") from None
