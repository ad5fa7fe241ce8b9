"""Results of Client.forward and Client.backward."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, NamedTuple, Optional, Tuple, Union

from ._arrays import Array
from ._receipt import Receipt as Receipt

if TYPE_CHECKING:
    from ._capture import Captured
    from ._problem import Options
    from ._residual import Residual


class _Result:
    """Has a receipt, which is read from the native call when it is first asked for."""

    __slots__ = ("_receipt",)

    def __init__(self, receipt: Union[Receipt, Callable[[], Receipt]]) -> None:
        self._receipt = receipt

    @property
    def receipt(self) -> Receipt:
        """Says what was done, and how long it took."""
        if not isinstance(self._receipt, Receipt):
            self._receipt = self._receipt()
        return self._receipt

    def _describe(self, **arrays: Optional[Array]) -> str:
        named = [f"{name}={array.dtype}{list(array.shape)}" for name, array in arrays.items() if array is not None]
        receipt = self.receipt
        return f"{type(self).__name__}({', '.join(named)}, {receipt.kernel or receipt.backend}, " \
               f"{1e3 * receipt.elapsed:.3g} ms)"


class ForwardCall(NamedTuple):
    """Keeps the arguments of a forward call, which its backward needs again."""

    q: object
    k: object
    v: object
    options: Options


class ForwardResult(_Result):
    """out: q's element type, in q's layout, head dim of v. lse: float32 [batch, q_heads, q_len] (packed
    [q_heads, total rows]), natural logarithm, before dropout; None unless asked for. residual: what servers keep for
    backward, an attnd.Residual; None unless asked for and kept. captured: the attention map, an attnd.sparse.Captured, if
    asked for.

    Client.backward(dout, result) takes q, k, v and the options from it: it holds those arrays, which are not to change
    meanwhile. A pickled result is without them. `out, lse = result` works too.
    """

    __slots__ = ("out", "lse", "residual", "call", "captured")

    def __init__(self, out: Array, lse: Optional[Array], receipt: Union[Receipt, Callable[[], Receipt]],
                 residual: Optional[Residual] = None) -> None:
        super().__init__(receipt)
        self.out, self.lse, self.residual = out, lse, residual
        self.call: Optional[ForwardCall] = None
        self.captured: Optional[Captured] = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.out, self.lse))

    def __repr__(self) -> str:
        return self._describe(out=self.out, lse=self.lse)

    def __reduce__(self) -> Tuple[Any, ...]:
        return ForwardResult, (self.out, self.lse, self.receipt)


class Gradients(_Result):
    """dq, dk, dv: of q, k, v. dbias: float32 of the bias's shape, if asked for. dsink: float32 [q_heads], if there
    is a sink. `dq, dk, dv = gradients` works too."""

    __slots__ = ("dq", "dk", "dv", "dbias", "dsink")

    def __init__(self, dq: Array, dk: Array, dv: Array, dbias: Optional[Array], dsink: Optional[Array],
                 receipt: Union[Receipt, Callable[[], Receipt]]) -> None:
        super().__init__(receipt)
        self.dq, self.dk, self.dv, self.dbias, self.dsink = dq, dk, dv, dbias, dsink

    def __iter__(self) -> Iterator[Array]:
        return iter((self.dq, self.dk, self.dv))

    def __repr__(self) -> str:
        return self._describe(dq=self.dq, dk=self.dk, dv=self.dv, dbias=self.dbias, dsink=self.dsink)

    def __reduce__(self) -> Tuple[Any, ...]:
        return Gradients, (self.dq, self.dk, self.dv, self.dbias, self.dsink, self.receipt)


@dataclass(frozen=True)
class Device:
    """One engine of a server. backend: "reference", "cpu" or "cuda"."""

    name: str
    uuid: str
    backend: str
    architecture: str
    memory_bytes: int
    serving: bool
    threads: int


@dataclass(frozen=True)
class MaskOnDevice:
    """How one device runs calls with a mask. kernel_forward and kernel_backward are named as in receipts; "": it has none,
    and `reason` says what to do. Tiles are of tile_rows × tile_keys scores, over all batch entries and heads: all of them,
    those that show everything, and those that show something, whose different pictures distinct_bitmaps counts."""

    device: str
    kernel_forward: str
    kernel_backward: str
    reason: str
    tile_rows: int
    tile_keys: int
    tiles: int
    tiles_full: int
    tiles_partial: int
    distinct_bitmaps: int
    plan_bytes: int
    compile_seconds: float

    def __str__(self) -> str:
        if not self.kernel_forward:
            return f"{self.device}: {self.reason}"
        visited = self.tiles_full + self.tiles_partial
        return (f"{self.device}: {self.kernel_forward}, backward {self.kernel_backward or 'none'}; {visited:,} of "
                f"{self.tiles:,} tiles of {self.tile_rows} x {self.tile_keys}, {self.tiles_full:,} full; "
                f"{self.distinct_bitmaps:,} bitmaps; {self.plan_bytes:,} bytes in {1e3 * self.compile_seconds:.3g} ms; "
                f"{self.reason}")


@dataclass(frozen=True, repr=False)
class MaskReport:
    """A daemon's report of a mask. nnz: how many of `scores` it shows, over all batch entries and heads and before causal,
    window and lengths; empty_rows: rows that see nothing of it. bytes_held: by the daemon. id: the mask's name, hexadecimal.
    """

    id: str
    scores: int
    nnz: int
    empty_rows: int
    bytes_held: int
    devices: List[MaskOnDevice]

    def __repr__(self) -> str:
        of = f"{self.nnz:,} of {self.scores:,} scores, {100 * self.nnz / self.scores:.3g} %"
        return "\n  ".join([f"<mask {self.id[:8]}: {of}; {self.empty_rows:,} empty rows; {self.bytes_held:,} bytes held",
                            *map(str, self.devices)]) + ">"


@dataclass(frozen=True)
class ServerInfo:
    """Says what a server is and can do. boot_epoch changes with each start of its process."""

    address: str
    version: str
    boot_epoch: str
    max_message_bytes: int
    features: List[str]
    devices: List[Device]
