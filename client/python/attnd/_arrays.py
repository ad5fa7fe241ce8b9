"""Arrays of the caller, taken without a copy: NumPy and anything with DLPack on the CPU.

Inside the package a tensor is its bits: float32 and float16 arrays as they are, bfloat16 as uint16, since NumPy
has no bfloat16 of its own.
"""
from __future__ import annotations

import ctypes
import math
from typing import Any, Dict, NamedTuple, Optional, Protocol, Sequence, Tuple, Union

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument, wrong, wrong_type

Array = npt.NDArray[Any]


class DLPackArray(Protocol):
    """An array of any library, such as a torch.Tensor."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Tuple[int, int]: ...

_BITS: Dict[str, np.dtype[Any]] = {"f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32)}
_EXPECTED = "an array of float16, float32 or ml_dtypes.bfloat16 on the CPU"


class Tensor(NamedTuple):
    """A tensor's bits and what they mean. `element` is "f16", "bf16" or "f32"."""

    bits: Array
    element: str


ArrayLike = Union[Array, DLPackArray, Tensor]


def bits_dtype(element: str) -> np.dtype[Any]:
    """The NumPy type that holds the bits of an element."""
    return _BITS[element]


def take(field: str, value: object) -> Tensor:
    """The caller's floating-point array. Raises InvalidType or InvalidArgument naming `field`."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return _from_numpy(field, value)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(field, value)
    raise wrong_type(field, _EXPECTED, value)


def give(tensor: Tensor) -> Array:
    """An array for the caller: bfloat16 becomes ml_dtypes.bfloat16 where that package is installed."""
    if tensor.element != "bf16":
        return tensor.bits
    bfloat16 = _bfloat16_dtype()
    return tensor.bits if bfloat16 is None else tensor.bits.view(bfloat16)


def cast(tensor: Tensor, element: str) -> Tensor:
    """The same numbers as another element, rounded to nearest even."""
    if tensor.element == element:
        return tensor
    floats = to_float32(tensor)
    if element == "bf16":
        return Tensor(_bfloat16_bits(floats), element)
    return Tensor(floats.astype(_BITS[element]), element)


def lift(largest: float) -> float:
    """The power of two that brings what is at most `largest`, and that far below 1, to about 1: float16 has nothing below
    6e-8."""
    if not 0 < largest < 0.5:
        return 1.0
    return math.ldexp(1.0, min(-math.frexp(largest)[1], 100))


def largest(*arrays: Optional[Array]) -> float:
    """The largest of their absolute numbers; NaN where one is."""
    return max([max(-float(array.min()), float(array.max())) for array in arrays if array is not None and array.size],
               default=0.0)


def to_float32(tensor: Tensor) -> Array:
    """The numbers as float32, exactly."""
    if tensor.element == "bf16":
        return (tensor.bits.astype(np.uint32) << 16).view(np.float32)
    return tensor.bits.astype(np.float32, copy=False)


def integers(field: str, value: object, low: int, high: int, shape: Optional[Tuple[int, ...]] = None) -> Array:
    """A list or array of integers as a contiguous int32 copy, each within low..high."""
    array = host(field, value)
    if array.dtype.kind not in "iu":
        raise wrong(field, "integers", f"an array of {array.dtype}")
    if shape is not None and array.shape != shape:
        raise wrong(field, f"shape {shape}", array.shape)
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        outside = array[(array < low) | (array > high)]
        raise wrong(field, f"{low}..{high}", int(outside.flat[0]))
    return np.array(array, dtype=np.int32, order="C")


def packed_bits(mask: Array) -> Array:
    """The bits of a bool array, uint8 [..., ceil(last / 8)] in C's order: packbits itself keeps the order of the mask's
    memory."""
    return np.ascontiguousarray(np.packbits(mask, axis=-1, bitorder="little"))


def host(field: str, value: object) -> Array:
    """A list, an array or a torch tensor as an array here."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:  # rows of several lengths
        raise wrong_type(field, "an array of integers", value) from None


def finite_floats(field: str, value: object) -> Array:
    """A list or array of finite numbers as a contiguous float32 copy."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().float().numpy()
    try:
        array = np.array(value, dtype=np.float32, order="C")
    except (TypeError, ValueError):
        raise wrong_type(field, "an array of numbers", value) from None
    if not np.isfinite(array).all():
        raise wrong(field, "finite numbers", array[~np.isfinite(array)].flat[0])
    return array


def without_broadcast(array: Array) -> Array:
    """The array with each dimension that a broadcast repeated (stride 0) cut to 1."""
    index = tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None)
                  for size, stride in zip(array.shape, array.strides))
    return array[index]


def _from_numpy(field: str, array: Array) -> Tensor:
    if not array.dtype.isnative:
        raise wrong(field, "native (little) endian numbers", array.dtype.str)
    if array.dtype == np.float32:
        return Tensor(array, "f32")
    if array.dtype == np.float16:
        return Tensor(array, "f16")
    if array.dtype.name == "bfloat16":
        return Tensor(array.view(np.uint16), "bf16")
    cure = "; .astype(np.float32) makes one" if array.dtype.kind in "fiu" else ""
    raise wrong(field, _EXPECTED + cure, f"an array of {array.dtype}")


def _bfloat16_bits(floats: Array) -> Array:
    bits = np.ascontiguousarray(floats).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    result: Array = np.where(np.isnan(floats), quiet, rounded).astype(np.uint16)
    return result


def _bfloat16_dtype() -> Optional[np.dtype[Any]]:
    try:
        import ml_dtypes
    except ImportError:
        return None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


# ---- DLPack, read here because NumPy's own reader refuses bfloat16. (dmlc/dlpack, include/dlpack/dlpack.h)

class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _DLDevice), ("ndim", ctypes.c_int32), ("dtype", _DLDataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_ON_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_DL_ELEMENTS = {(2, 16): "f16", (2, 32): "f32", (4, 16): "bf16"}  # (code, bits)


def _from_dlpack(field: str, value: Any) -> Tensor:
    old = False
    try:
        device = int(value.__dlpack_device__()[0])
        if device not in _ON_HOST:
            raise wrong(field, _EXPECTED, f"an array on DLPack device type {device}; move it to the CPU first")
        if getattr(value, "is_neg", bool)():  # torch exports the memory alone, whose numbers have the other sign
            raise BufferError("it is a negated view; use tensor.resolve_neg()")
        try:
            capsule = value.__dlpack__(max_version=(1, 0))
        except TypeError:  # written before DLPack 1.0
            old, capsule = True, value.__dlpack__()
    except InvalidArgument:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise wrong(field, "an array that DLPack can export", f"{type(value).__name__} ({error})") from error
    source, writable = _open_capsule(capsule)
    element = _DL_ELEMENTS.get((source.dtype.code, source.dtype.bits))
    if element is None or source.dtype.lanes != 1:
        raise wrong(field, _EXPECTED, f"DLPack type code {source.dtype.code} of {source.dtype.bits} bits")
    shape = tuple(source.shape[n] for n in range(source.ndim))
    strides = tuple(source.strides[n] for n in range(source.ndim)) if source.strides else None
    view = _view_memory(source.data + source.byte_offset if source.data else 0, shape, strides, _BITS[element], capsule)
    if not (writable or old):
        view.flags.writeable = False
    return Tensor(view, element)


def _open_capsule(capsule: object) -> Tuple[_DLTensor, bool]:
    """The tensor in it, and whether the capsule says that it may be written."""
    get_pointer, is_valid = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_IsValid
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    is_valid.restype, is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    if not is_valid(capsule, b"dltensor_versioned"):
        return _DLTensor.from_address(get_pointer(capsule, b"dltensor")), False
    versioned = _DLManagedTensorVersioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
    return versioned.tensor, not versioned.flags & 1


def _view_memory(address: int, shape: Tuple[int, ...], strides: Optional[Sequence[int]], dtype: np.dtype[Any],
                 owner: object) -> Array:
    """An array over foreign memory that keeps `owner` alive. `strides` count elements."""
    if 0 in shape:
        return np.empty(shape, dtype)
    if strides is None:
        sizes = np.cumprod((1,) + shape[:0:-1])[::-1]
        strides = [int(size) for size in sizes]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    memory: Any = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    memory.owner = owner
    view: Array = np.ndarray(shape, dtype, memory, 0, tuple(stride * dtype.itemsize for stride in strides))
    return view
