"""Record: what a model's construction computes, on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.errors import TaskError

# In-place operations that read nothing of what they overwrite.
_OVERWRITE = {
    f"aten::{name}_"
    for name in (
        "normal",
        "uniform",
        "zero",
        "fill",
        "copy",
        "random",
        "exponential",
        "log_normal",
        "cauchy",
        "geometric",
    )
}
# of torch.nn.init: recorded as one, since they ask for values
_LOOPS = ("trunc_normal_", "_no_grad_trunc_normal_")
_ASK = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::unique_dim",
    "aten::_unique2",
}
# the same of Python
_ASKING = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__"}
_CPU, _META = torch.device("cpu"), torch.device("meta")
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


class Handle(NamedTuple):
    """A tensor of the record: a view of a memory block."""

    block: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Of the elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


@dataclass
class RecordedCall:
    """A recorded call. Tensors in the arguments are Handles."""

    call: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    made: list[Handle] = field(default_factory=list)  # results in memory of their own
    written: list[Handle] = field(default_factory=list)
    read: set[int] = field(default_factory=set)  # blocks
    is_random: bool = False
    overwrites: bool = False
    for_numbers: bool = False  # it runs for its random numbers alone


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a model's construction, on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[RecordedCall] = []
        self.sizes: dict[int, int] = {}  # bytes of a block
        self.given: dict[int, Tensor] = {}  # blocks that have values, as of a file
        self._devices: dict[int, torch.device] = {}  # of the others
        self._alive: list[Any] = []  # storages, so that no other takes the address of one
        self._marks: set[int] = set()  # seeds that `_mark` gave to generators
        self._last: dict[int, int] = {}  # generator -> its mark

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs within the context.

        Raises:
            TaskError: the value of a tensor without memory is needed.
        """
        at: dict[tuple[Any, str], Any] = {(torch, "manual_seed"): self._seed}
        at |= {
            (nn.init, name): self._whole(getattr(nn.init, name))
            for name in _LOOPS
            if hasattr(nn.init, name)
        }
        before = {(owner, name): getattr(owner, name) for owner, name in at}
        try:
            for (owner, name), call in at.items():
                setattr(owner, name, call)
            with self, _Pretence(self):
                yield
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "meta" not in str(error):
                raise
            raise _needs_value(str(error).splitlines()[0]) from error
        finally:
            for (owner, name), call in before.items():
                setattr(owner, name, call)

    def _seed(self, seed: int) -> torch.Generator:
        self.operations.append(
            RecordedCall(torch.default_generator.manual_seed, (int(seed),), is_random=True)
        )
        return torch.default_generator

    def _mark(self, arguments: Any) -> None:
        """Record the state of a generator among the arguments of a draw, unless it is that after
        the draw before.

        A recorded draw moves no generator; each gets a mark in place of it, a seed at random. One
        that has another seed at its next draw was seeded by the user, maybe as it was before.

        Raises:
            TaskError: it has the state that another draw would have led to.
        """
        for generator in tree_leaves(arguments):
            own = generator._cdata if isinstance(generator, torch.Generator) else None  # type: ignore[attr-defined]
            if own in (None, torch.default_generator._cdata):  # type: ignore[attr-defined]
                continue
            seed = generator.initial_seed()
            if seed not in self._marks:
                call, state = generator.set_state, generator.get_state()
                self.operations.append(RecordedCall(call, (state,), is_random=True))
            elif seed != self._last.get(own):
                raise TaskError(
                    "configure_model sets the state of a torch.Generator that was drawn from, and"
                    " the engine draws later. Use manual_seed, or make these layers in __init__."
                )
            self._last[own] = generator.seed()
            self._marks.add(self._last[own])

    def _whole(self, initialize: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with torch._C.DisableTorchFunction():
                own = self.handle(tensor)
            covers = own.num_bytes == self.sizes[own.block]
            read = set() if covers else {own.block}
            self._mark((args, kwargs))
            self.operations.append(
                RecordedCall(initialize, (own, *args), kwargs, [], [own], read, True, covers)
            )
            return tensor

        return record

    def handle(self, tensor: Tensor, device: torch.device = _CPU) -> Handle:
        """Return the handle of a tensor; one that has memory is kept.

        Args:
            device: where its values will be, if it is without memory and not known yet.
        """
        storage = tensor.untyped_storage()
        block = int(storage._cdata)
        if block not in self.sizes:
            self._alive.append(storage)
            self.sizes[block] = storage.nbytes()
            self._devices[block] = device if tensor.is_meta else tensor.device
            if not tensor.is_meta:
                self.given[block] = tensor.detach()
        at = int(tensor.storage_offset())
        return Handle(
            block,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            at,
            tensor.dtype,
            self._devices[block],
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what follows asks for true devices
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        own = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        has_device = any(argument.name == "device" for argument in schema.arguments)
        if not is_random and (not any(t.is_meta for t in own) if own else not has_device):
            return func(*args, **kwargs)
        if schema.name in _ASK:
            raise _needs_value(schema.name.removeprefix("aten::"))
        stand_ins: dict[int, Tensor] = {}  # of tensors with values
        result = func(
            *_on_meta(args, stand_ins),
            **_on_meta(kwargs | ({"device": _META} if has_device else {}), stand_ins),
        )
        if (
            not own
            and not is_random
            and not any(t.is_floating_point() or t.is_complex() for t in tree_leaves(result))
        ):
            return func(*args, **kwargs)
        self._add(
            func,
            args,
            kwargs,
            own,
            [t for t in tree_leaves(result) if isinstance(t, Tensor)],
            stand_ins,
        )
        real = {
            id(stand_in): tensor
            for tensor in own
            if (stand_in := stand_ins.get(id(tensor))) is not None
        }
        return tree_map(lambda value: real.get(id(value), value), result)

    def _add(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        own: list[Tensor],
        results: list[Tensor],
        stand_ins: Mapping[int, Tensor],
    ) -> None:
        handles = {id(tensor): self.handle(tensor) for tensor in own}
        before = {handle.block for handle in handles.values()}
        of_stand_ins = {int(tensor.untyped_storage()._cdata) for tensor in stand_ins.values()}
        device = torch.device(
            kwargs.get("device") or next((handle.device for handle in handles.values()), _CPU)
        )
        device = _CPU if device == _META else device
        made = [
            self.handle(t, device)
            for t in results
            if int(t.untyped_storage()._cdata) not in of_stand_ins
        ]
        made = [handle for handle in made if handle.block not in before]
        schema = func._schema
        written = [
            handles[id(value)]
            for argument, value in zip(schema.arguments, args, strict=False)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and id(value) in handles
        ]
        if not made and not written:
            return  # a view
        names = {argument.name for argument in schema.arguments}
        if not own and "dtype" in names:
            kwargs["dtype"] = made[0].dtype  # the default of this moment
        if "device" in names:
            kwargs["device"] = device
        overwrites = (
            schema.name in _OVERWRITE and written[0].num_bytes == self.sizes[written[0].block]
        )
        read = before - {written[0].block} if overwrites else before
        arguments: Any = tree_map(lambda value: handles.get(id(value), value), (args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self._mark(arguments)
        self.operations.append(
            RecordedCall(
                func, arguments[0], arguments[1], made, written, read, is_random, overwrites
            )
        )


def _on_meta(arguments: Any, stand_ins: dict[int, Tensor]) -> Any:
    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        return stand_ins[id(value)]

    return tree_map(stand_in, arguments)


def _needs_value(what: str) -> TaskError:
    return TaskError(
        f"configure_model needs the value of a tensor ({what}), and layers are made without memory"
        " there if the engine splits the weights. Compute such numbers with Python or numpy, or"
        " make these layers in __init__."
    )


class _Pretence(TorchFunctionMode):
    """Tensors of a record have the device that they will have:
    initializers leave meta tensors out.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ASKING and any(
            tensor.device == _META for tensor in args if isinstance(tensor, Tensor)
        ):
            raise _needs_value(name)
        result = func(*args, **(kwargs or {}))
        if func == _DEVICE:
            return self._record.handle(args[0]).device if result == _META else result
        return False if func == _IS_META else result
