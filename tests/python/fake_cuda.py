"""A CUDA device that is none, for tests of what moves where on machines without one.

Under `FakeCuda`, tensors can be on "cuda:0": their numbers lie in a hidden tensor that only operations on the device
see. As on a device, a copy to page-locked memory that does not block has not happened until the stream is synchronised,
page-locked memory is NaN until then, and a copy from or to other memory is counted as pageable. There is no autograd:
torch's needs the real device's streams.
"""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten


class OnDevice(torch.Tensor):
    """A tensor of the fake device."""

    @staticmethod
    def __new__(cls, hidden):
        made = torch.Tensor._make_wrapper_subclass(cls, hidden.size(), strides=hidden.stride(), dtype=hidden.dtype,
                                                   storage_offset=hidden.storage_offset(), device=DEVICE)
        made.hidden = hidden
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a device tensor outside of FakeCuda")


class FakeCuda(TorchDispatchMode):
    def __init__(self, monkeypatch):
        super().__init__()
        self._queue, self._pinned = [], set()
        self.synchronised = 0
        self.fetched_bytes = self.pageable_copies = 0
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: self._is_pinned(tensor))

    def synchronize(self):
        self.synchronised += 1
        for work in self._queue:
            work()
        self._queue.clear()

    def put(self, host):
        return OnDevice(host.detach().clone())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", None):
            return self._new_pinned(func, args, kwargs)
        to_device = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if func == aten.copy_.default:
            return self._copy(*args)
        if func == aten._to_copy.default and not to_device and "device" in kwargs and isinstance(args[0], OnDevice):
            self.pageable_copies += 1
            return func(args[0].hidden, **kwargs)
        if func == aten._to_copy.default and to_device and not isinstance(args[0], OnDevice):
            self.pageable_copies += not self._is_pinned(args[0])
            kwargs.pop("non_blocking", None)
            return OnDevice(func(args[0], **{**kwargs, "device": "cpu"}).clone())
        if to_device:
            kwargs["device"] = "cpu"
        seen = to_device or any(isinstance(a, OnDevice) for a in torch.utils._pytree.tree_leaves((args, kwargs)))
        result = func(*tree_map(self._reveal, args), **tree_map(self._reveal, kwargs))
        return tree_map(lambda a: OnDevice(a) if isinstance(a, torch.Tensor) else a, result) if seen else result

    @staticmethod
    def _reveal(value):
        return value.hidden if isinstance(value, OnDevice) else value

    def _is_pinned(self, tensor):
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self._pinned

    def _new_pinned(self, func, args, kwargs):
        made = func(*tree_map(self._reveal, args), **kwargs)
        if made.is_floating_point():
            made.fill_(torch.nan)
        self._pinned.add(made.untyped_storage().data_ptr())
        return made

    def _copy(self, target, source, non_blocking=False):
        if isinstance(source, OnDevice) and not isinstance(target, OnDevice):
            self.fetched_bytes += target.numel() * target.element_size()
            if non_blocking and self._is_pinned(target):
                self._queue.append(lambda: target.copy_(source.hidden))
                return target
            self.pageable_copies += 1
        self._reveal(target).copy_(self._reveal(source))
        return target
