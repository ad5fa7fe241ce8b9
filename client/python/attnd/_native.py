"""libattnd_client.so by ctypes: structures, loading, and the copy that a forked process needs.

The library's header is client/c/attnd_client.h. ctypes releases the GIL while a function runs.

A forked child has none of its parent's threads, so the gRPC that the parent used is dead in it. The child
therefore loads the library and what it depends on a second time under other names, with globals of their own.
"""
from __future__ import annotations

import ctypes
import os
import threading
from typing import List, Optional, Tuple, Type, TypeVar

from .errors import Internal

ABI_VERSION = 3
ELEMENTS = {"f16": 1, "bf16": 2, "f32": 3}
LAYOUTS = {"bhld": 1, "blhd": 2, "thd": 3, "htd": 4}
ALIGNMENTS = {"none": 0, "top_left": 1, "bottom_right": 2, "offsets": 3}
SOFTMAX, ZERO_REST, SINK = 0, 1, 2
PRIORITIES = {"low": 1, "normal": 2, "high": 3}

_MARK = b"-attnd0"  # in the names of the bundled libraries; a copy's names have another digit
_COPIES = "123456789abcdefghijklmnopqrstuvwxyz"
_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Sized(ctypes.Structure):
    """A structure that says its own size, as the header demands."""

    def __init__(self, **values: object) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **values)


class NumberArray(ctypes.Structure):
    _fields_ = [("data", _pointer), ("count", _int64)]


class Counters(_Sized):
    _fields_ = [("struct_size", ctypes.c_size_t), ("calls", _int64), ("failed_calls", _int64), ("retries", _int64),
                ("failovers", _int64), ("leases_lost", _int64), ("replays", _int64), ("seconds_waiting", ctypes.c_double)]


class ClientOptions(_Sized):
    _fields_ = [("struct_size", ctypes.c_size_t), ("addresses", ctypes.POINTER(ctypes.c_char_p)),
                ("address_count", _int64), ("channels_per_address", _int32), ("use_tls", _int32),
                ("tls_ca_file", ctypes.c_char_p), ("tls_certificate_file", ctypes.c_char_p),
                ("tls_key_file", ctypes.c_char_p), ("tls_server_name", ctypes.c_char_p),
                ("bearer_token", ctypes.c_char_p), ("timeout_seconds", ctypes.c_double), ("max_attempts", _int32),
                ("wait_for_ready", _int32), ("shard_bytes", _int64), ("max_reply_bytes", _int64),
                ("merge_partial_results", _int32), ("proxy", ctypes.c_char_p)]


class Problem(_Sized):
    _fields_ = [("struct_size", ctypes.c_size_t),
                *[(name, _int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "qk_head_dim",
                                              "v_head_dim")],
                ("element", _int32), ("layout", _int32), ("has_scale", _int32), ("scale", ctypes.c_float),
                ("softcap", ctypes.c_float), ("alignment", _int32), ("offsets", NumberArray), ("causal", _int32),
                ("has_window", _int32), ("window_left", _int64), ("window_right", _int64),
                ("kv_lengths", NumberArray), ("cu_seqlens_q", NumberArray), ("cu_seqlens_k", NumberArray),
                ("has_bool_mask", _int32), ("has_bias", _int32), ("bool_mask_shape", _int64 * 4),
                ("bias_shape", _int64 * 4), ("bias_element", _int32), ("bias_want_gradient", _int32),
                ("alibi_slopes", NumberArray), ("dropout_seed", ctypes.c_uint64),
                ("dropout_offset", ctypes.c_uint64), ("dropout_threshold", ctypes.c_uint32), ("denominator", _int32),
                ("sink_logits", NumberArray), ("accumulate_float16", _int32), ("allow_nondeterministic", _int32),
                ("mask", _pointer)]


_T = TypeVar("_T", bound="_Tensors")


def _tensors(*names: str) -> List[Tuple[str, type]]:
    return [("struct_size", ctypes.c_size_t), *[(name, _pointer) for name in names]]


class _Tensors(_Sized):
    @classmethod
    def of(cls: Type[_T], *addresses: Optional[int]) -> _T:
        """With the addresses of the tensors in the order of the fields; fields beyond them are null."""
        made = cls.__new__(cls)
        ctypes.Structure.__init__(made, ctypes.sizeof(cls), *addresses)
        return made


class Capture(_Sized):
    _fields_ = [("struct_size", ctypes.c_size_t), ("block", _int64), ("keep", _int32), ("previous", ctypes.c_char_p),
                ("pooled", _pointer)]


class ForwardTensors(_Tensors):
    _fields_ = _tensors("q", "k", "v", "mask_bits", "bias", "o", "lse", "keep", "capture")


class BackwardTensors(_Tensors):
    _fields_ = _tensors("q", "k", "v", "mask_bits", "bias", "o", "lse", "d_o", "d_lse", "d_q", "d_k", "d_v", "d_bias",
                        "d_sink", "residual")


class ModuleForward(_Sized):
    _fields_ = [("struct_size", ctypes.c_size_t), ("header", ctypes.c_char_p), ("header_bytes", _int64),
                ("x", _pointer), ("memory", _pointer), ("mask_bits", _pointer), ("x_bytes", _int64),
                ("memory_bytes", _int64), ("mask_bits_bytes", _int64), ("y", _pointer), ("keep", _pointer)]


class ModuleBackward(_Sized):
    _fields_ = [("struct_size", ctypes.c_size_t), ("activations", _pointer), ("dy", _pointer), ("dy_bytes", _int64),
                ("dx", _pointer), ("d_memory", _pointer), ("d_memory_bytes", _int64), ("no_weight_gradients", _int32),
                ("turn", ctypes.c_uint64)]


class ModuleTensor(ctypes.Structure):
    _fields_ = [("kind", _int32), ("element", _int32), ("name", ctypes.c_char_p), ("data", _pointer), ("bytes", _int64),
                ("shape", ctypes.POINTER(_int64)), ("dimensions", _int32)]


class Progress(ctypes.Structure):
    _fields_ = [(name, _int64) for name in ("shards_done", "shards_total", "bytes_sent", "bytes_received",
                                            "bytes_total")]


POLL_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, _pointer)
_PROTOTYPES = {  # name: (result, arguments)
    "attnd_abi_version": (ctypes.c_int, []),
    "attnd_version": (ctypes.c_char_p, []),
    "attnd_call_new": (_pointer, [ctypes.c_char_p, ctypes.c_double, _int32]),
    "attnd_call_free": (None, [_pointer]),
    "attnd_call_cancel": (None, [_pointer]),
    "attnd_call_get_progress": (None, [_pointer, ctypes.POINTER(Progress)]),
    "attnd_call_message": (ctypes.c_char_p, [_pointer]),
    "attnd_call_detail_json": (ctypes.c_char_p, [_pointer]),
    "attnd_call_result_json": (ctypes.c_char_p, [_pointer]),
    "attnd_client_new": (_pointer, [ctypes.POINTER(ClientOptions), _pointer]),
    "attnd_client_free": (None, [_pointer]),
    "attnd_client_get_counters": (None, [_pointer, ctypes.POINTER(Counters)]),
    "attnd_call_set_traceparent": (None, [_pointer, ctypes.c_char_p]),
    "attnd_build_pattern": (ctypes.c_int, [_pointer, ctypes.c_char_p, _int64, ctypes.c_char_p, _pointer]),
    "attnd_release_capture": (ctypes.c_int, [_pointer, ctypes.c_char_p, _pointer]),
    "attnd_mask_new": (_pointer, [ctypes.c_char_p, *[_int64] * 5, _pointer]),
    "attnd_mask_free": (None, [_pointer]),
    "attnd_compile_mask": (ctypes.c_int, [_pointer, _int32, ctypes.POINTER(Problem), _pointer]),
    "attnd_residual_free": (None, [_pointer]),
    "attnd_residual_bytes": (_int64, [_pointer]),
    "attnd_local_new": (_pointer, [_int32, _int32]),
    "attnd_memory_new": (_pointer, [_pointer, _int64]),
    "attnd_memory_data": (_pointer, [_pointer]),
    "attnd_memory_free": (None, [_pointer]),
    "attnd_call_set_poll_hook": (None, [_pointer, POLL_HOOK, _pointer]),
    "attnd_call_code": (ctypes.c_int, [_pointer]),
    "attnd_server_info": (ctypes.c_int, [_pointer, _int32, _pointer]),
    "attnd_check_health": (ctypes.c_int, [_pointer, _int32, ctypes.POINTER(_int32), _pointer]),
}
_PROTOTYPES.update({
    "attnd_module_register": (_pointer, [_pointer, ctypes.c_char_p, _int64, _int64, _pointer]),
    "attnd_module_free": (None, [_pointer]),
    "attnd_module_release": (ctypes.c_int, [_pointer, _pointer]),
    "attnd_module_status": (ctypes.c_int, [_pointer, _pointer]),
    "attnd_module_list": (ctypes.c_int, [_pointer, _pointer]),
    "attnd_module_keep_snapshots": (None, [_pointer, ctypes.c_uint64]),
    "attnd_module_is_recoverable": (ctypes.c_int, [_pointer]),
    "attnd_module_join": (ctypes.c_int, [_pointer, ctypes.c_int32, ctypes.c_int32, _pointer]),
    "attnd_module_follow": (ctypes.c_int, [_pointer, _pointer]),
    "attnd_module_sequence": (ctypes.c_uint64, [_pointer]),
    "attnd_module_micro_batches": (ctypes.c_uint32, [_pointer]),
    "attnd_module_reserve_turn": (ctypes.c_uint64, [_pointer]),
    "attnd_module_give_up_turn": (None, [_pointer, ctypes.c_uint64]),
    "attnd_module_forward": (ctypes.c_int, [_pointer, ctypes.POINTER(ModuleForward), _pointer]),
    "attnd_module_backward": (ctypes.c_int, [_pointer, ctypes.POINTER(ModuleBackward), _pointer]),
    "attnd_activations_free": (None, [_pointer]),
    "attnd_module_gradient_stats": (ctypes.c_int, [_pointer, _pointer]),
    "attnd_module_parameter_stats": (ctypes.c_int, [_pointer, ctypes.c_int32, _pointer]),
    "attnd_digest": (ctypes.c_uint64, [_pointer, ctypes.c_int64]),
    "attnd_module_step": (ctypes.c_int, [_pointer, ctypes.c_char_p, _int64, _pointer]),
    "attnd_module_sum_gradients": (ctypes.c_int, [_pointer, ctypes.c_char_p, _int64, _pointer]),
    "attnd_module_put": (ctypes.c_int, [_pointer, _pointer, _int64, _int64, _int32, _pointer]),
    "attnd_module_put_gradients": (ctypes.c_int, [_pointer, _pointer, _int64, _pointer]),
    "attnd_module_get": (ctypes.c_int, [_pointer, _pointer, _int64, _pointer]),
})
for _name, _structure in (("forward", ForwardTensors), ("backward", BackwardTensors)):
    for _prefix in ("attnd_", "attnd_local_"):
        _PROTOTYPES[_prefix + _name] = (ctypes.c_int, [_pointer, ctypes.POINTER(Problem), ctypes.POINTER(_structure),
                                                       _pointer])

# These end at once: they keep the GIL, since to give it up and get it back would take longer.
_QUICK = {"attnd_call_new", "attnd_call_free", "attnd_call_set_poll_hook"}

_lock = threading.RLock()
_library: Optional[ctypes.CDLL] = None
_generation = 0  # forks between the process that imported this module and this one


def library() -> ctypes.CDLL:
    """The library of this process, loaded when first asked for."""
    global _library
    with _lock:
        if _library is None:
            path = find()
            _library = _load(path) if _generation == 0 else _load_copy(path)
        return _library


def lock() -> threading.RLock:
    """Guards the making of native objects; a new one in each forked child, where the parent's may be held for ever."""
    return _lock


def generation() -> int:
    """Changes when the process forks: native handles of another generation must not be used."""
    return _generation


def find() -> str:
    """Where the library lies: the file that ATTND_CLIENT_LIBRARY names, else beside this module."""
    named = os.environ.get("ATTND_CLIENT_LIBRARY")
    path = named or os.path.join(os.path.dirname(__file__), "native", f"libattnd_client{_MARK.decode()}.so")
    if not os.path.exists(path):
        raise Internal(f"attnd's native library is not at {path}: install the wheel, or set ATTND_CLIENT_LIBRARY")
    return path


def _load(path: str) -> ctypes.CDLL:
    loaded, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(quick if name in _QUICK else loaded, name)
        function.restype, function.argtypes = result, arguments
        setattr(loaded, name, function)
    if loaded.attnd_abi_version() != ABI_VERSION:
        raise Internal(f"{path} has C interface {loaded.attnd_abi_version()}, this package needs {ABI_VERSION}: "
                       "install library and package from the same wheel")
    return loaded


def _load_copy(path: str) -> ctypes.CDLL:
    """Loads a copy, which need not exist longer than that, from the first folder that allows programs."""
    import tempfile
    failures = []
    for parent in (tempfile.gettempdir(), "/dev/shm", os.getcwd()):
        try:
            with tempfile.TemporaryDirectory(prefix="attnd-", dir=parent) as folder:
                return _load(_copy(path, folder, _generation))
        except OSError as error:
            failures.append(f"{parent}: {error}")
    raise Internal(f"no place for the copy of the library that a forked process needs ({'; '.join(failures)}): let "
                   "TMPDIR name a folder with 30 MB that is not mounted noexec")


def _copy(path: str, folder: str, generation: int) -> str:
    """A copy of the library and its bundled dependencies under names that nothing loaded has."""
    source_folder, name = os.path.split(path)
    if _MARK.decode() not in name:
        raise Internal(f"{path} cannot be used after a fork, since it is not the wheel's; use the start method "
                       '"spawn" or "forkserver"')
    if generation > len(_COPIES):
        raise Internal(f"forked {generation} times from the process that loaded attnd; at most {len(_COPIES)}: use the "
                       'start method "spawn" or "forkserver"')
    mark = _MARK[:-1] + _COPIES[generation - 1].encode()
    for source in os.listdir(source_folder):
        with open(os.path.join(source_folder, source), "rb") as original:
            renamed = original.read().replace(_MARK, mark)
        with open(os.path.join(folder, source.replace(_MARK.decode(), mark.decode())), "wb") as copy:
            copy.write(renamed)
    return os.path.join(folder, name.replace(_MARK.decode(), mark.decode()))


def _forget_parent() -> None:
    """Runs in each forked child: its locks and its library are new."""
    global _lock, _library, _generation
    _lock = threading.RLock()
    if _library is not None:
        _library, _generation = None, _generation + 1


os.register_at_fork(after_in_child=_forget_parent)
