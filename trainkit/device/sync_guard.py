"""Asserts that a step reads nothing off the device: `trainer.assert_no_sync=true`.

A read (`item()`, `if tensor:`, `nonzero()`, ...) makes the host wait until the GPU has finished all
queued work, and the GPU then waits for the host: the commonest cause of a slow step. On a GPU
torch's own sync debug mode detects every read. On the CPU nothing waits, so the calls are
intercepted: a step that passes there will not wait on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.errors import SyncError

_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZERS = f"{_TORCH}/optim/"  # their step counts are on the CPU, for a GPU too
# operators with a result, or a shape of it, that the host must know
_READING_OPERATORS = {
    "_local_scalar_dense": "item(), float(tensor), int(tensor), or `if tensor:`",
    "is_nonzero": "`if tensor:`",
    "equal": "torch.equal()",
    "nonzero": "nonzero(), where() with one argument, or a boolean mask as index",
    "masked_select": "masked_select()",
    "_unique2": "unique()",
    "unique_dim": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "repeat_interleave": "repeat_interleave() without output_size",
    "bincount": "bincount()",
}
# methods that copy to the host without an operator
_READING_METHODS = {
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.cpu: "cpu()",
    Tensor.__array__: "numpy.asarray()",
}


class SyncGuard:
    """A reusable context in which a read off the step's device is an error."""

    _active: SyncGuard | None = None

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        SyncGuard._active = self
        if self._on_gpu:
            self._stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        else:
            self._stack.enter_context(_Operators())  # type: ignore[no-untyped-call]
            self._stack.enter_context(_Methods())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        SyncGuard._active = None
        self._stack.close()
        if isinstance(error, RuntimeError) and "synchronizing CUDA operation" in str(error):
            while (
                trace is not None
                and trace.tb_next is not None
                and _is_users(trace.tb_next.tb_frame.f_code.co_filename)
            ):
                trace = trace.tb_next
            where = (
                "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            )
            raise _sync_error("a value that the host needs", where) from error


@contextlib.contextmanager
def allowed_read() -> Iterator[None]:
    """Allow a documented read of trainkit's own."""
    guard = SyncGuard._active
    if guard is None:
        yield
    elif guard._on_gpu:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    else:
        paused = _Operators.paused
        _Operators.paused = True
        try:
            yield
        finally:
            _Operators.paused = paused


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _READING_OPERATORS.get(func.overloadpacket.__name__)
        if func.overloadpacket.__name__ == "index" and any(_is_mask(index) for index in args[1]):
            what = "a boolean mask as index"
        if what is not None:
            _refuse(what)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING_METHODS:
            _refuse(_READING_METHODS[func])
        return func(*args, **(kwargs or {}))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_users(filename: str) -> bool:
    return not filename.startswith((_TORCH, "<", __file__))


def _refuse(what: str) -> None:
    if _Operators.paused:
        return
    frame = sys._getframe(2)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return
        assert frame.f_back is not None
        frame = frame.f_back
    raise _sync_error(what, f"{frame.f_code.co_filename}:{frame.f_lineno}")


def _sync_error(what: str, where: str) -> SyncError:
    return SyncError(
        f"A step read {what} off the device, at {where}. On a GPU the step would wait there until"
        " everything is computed. Keep the value a tensor: self.log takes tensors,"
        " torch.where(condition, a, b) replaces an if. Or set trainer.assert_no_sync=false."
    )
