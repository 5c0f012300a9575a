"""The states that checkpoints hold:
random numbers, plain values, and their packing for a commit in memory.
"""

from __future__ import annotations

import array
import io
import pickle
import platform
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.device.accelerator import generators
from trainkit.device.shards import is_spread, local_of
from trainkit.engine.pieces import OwnPart
from trainkit.errors import TaskError
from trainkit.version import __version__

# Types that a reader can rebuild without running code. By exact type: numpy.float64 is a float, and
# is refused when read.
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
_OF_OPTIMIZERS = (
    "Take another optimizer, or give a subclass of it a state_dict() and a load_state_dict() of"
    " such values; trainer.enable_checkpointing=false trains without checkpoints."
)
_OF_OTHERS = "Save float(x), x.tolist() or str(x)."


def packed_part(own: dict[str, Any], of_rank_0: dict[str, Any] | None) -> bytes:
    """Return a rank's parts for a commit; on rank 0 with the parts that only it has in full."""
    return pack(own if of_rank_0 is None else own | {"of_rank_0": without_tensors(of_rank_0)})


def with_ranks(contents: dict[str, Any], packed: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Return contents collected without ranks, with each rank's `packed_part`:
    any rank can resume as rank 0.
    """
    ranks = [unpack(part) for part in packed]
    of_rank_0: dict[str, Any] = with_tensors(ranks[0].pop("of_rank_0"), contents)
    return contents | {name: [own[name] for own in ranks] for name in ranks[0]} | of_rank_0


_SMALL_BYTES = 1 << 20  # of a tensor that a callback may have on rank 0 alone


_PART = "__own_part__"  # a key of a mapping that stands for what this rank holds of a tensor


def own_parts(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples with what this rank holds of each tensor that is
    spread over ranks.
    """
    if isinstance(tree, Tensor):
        return {_PART: local_of(tree), "shape": tuple(tree.shape)} if is_spread(tree) else tree
    if isinstance(tree, dict):
        copied = type(tree)()
        for key, value in tree.items():
            copied[key] = own_parts(value)
        return copied
    return type(tree)(map(own_parts, tree)) if type(tree) in (list, tuple) else tree


def with_own_parts(tree: Any) -> Any:
    """Return the result of `own_parts` with parts that can be read in their places."""
    if _is_part(tree):
        return OwnPart(tree[_PART], tuple(tree["shape"]))
    if isinstance(tree, dict):
        return {key: with_own_parts(value) for key, value in tree.items()}
    return type(tree)(map(with_own_parts, tree)) if type(tree) in (list, tuple) else tree


def _is_part(tree: Any) -> bool:
    return isinstance(tree, dict) and _PART in tree


class _Tensor:
    """Placeholder of a tensor; the class itself is pickled by name."""


def without_tensors(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples without its large tensors,
    which are equal on all ranks.
    """
    if isinstance(tree, torch.Tensor):
        return _Tensor if tree.numel() * tree.element_size() > _SMALL_BYTES else tree.detach().cpu()
    if _is_part(tree):
        return _Tensor
    if isinstance(tree, dict):
        return {key: without_tensors(value) for key, value in tree.items()}
    return type(tree)(map(without_tensors, tree)) if type(tree) in (list, tuple) else tree


def with_tensors(tree: Any, own: Any) -> Any:
    """Return the result of `without_tensors` with the tensors of
    `own` in their places (None if it has none).
    """
    if tree is _Tensor:
        return own
    if isinstance(tree, dict):
        there = own if isinstance(own, dict) else {}
        return {key: with_tensors(value, there.get(key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        held = list(own)[: len(tree)] if isinstance(own, (list, tuple)) else []
        return type(tree)(map(with_tensors, tree, [*held, *[None] * (len(tree) - len(held))]))
    return tree


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and trainkit for a checkpoint's manifest."""
    return {
        "trainkit": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def random_state() -> dict[str, Any]:
    """Return this process's random states as tensors and plain values."""
    drawn = np.random.get_state(legacy=False)
    version, numbers, gauss_next = random.getstate()
    others = {name: kind.get_rng_state() for name, kind in generators().items()}
    return others | {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "numpy": [
            str(drawn["bit_generator"]),
            torch.from_numpy(drawn["state"]["key"].astype(np.int64)),
            *(
                float(drawn[name] if name in drawn else drawn["state"][name])
                for name in ("pos", "has_gauss", "gauss")
            ),
        ],
        # As one tensor, since 625 numbers would be visited one by one; by way of an array, which is
        # fast.
        "python": [
            version,
            torch.frombuffer(array.array("q", numbers), dtype=torch.int64),
            gauss_next,
        ],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set this process's random states."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    for name, kind in generators().items():
        if name in state:
            kind.set_rng_state(state[name])
    np.random.set_state(_of_numpy(state))
    random.setstate(_of_python(state))


def check_random_state(state: Mapping[str, Any]) -> None:
    """Set the states of other generators;
    raises what their libraries raise if `set_random_state` would fail on the host.
    """
    torch.Generator().set_state(state["torch"])
    for name in {"cuda", "xpu", "mps"} & state.keys():
        if state[name] is not None and not isinstance(state[name], Tensor):
            raise TypeError(f"{name} is {type(state[name]).__name__}")
    np.random.RandomState().set_state(_of_numpy(state))
    random.Random().setstate(_of_python(state))


def _of_numpy(state: Mapping[str, Any]) -> tuple[Any, ...]:
    name, keys, place, has_gauss, gauss = state["numpy"]
    return name, keys.numpy().astype(np.uint32), int(place), int(has_gauss), gauss


def _of_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    version, numbers, gauss_next = state["python"]
    return version, tuple(numbers.tolist()), gauss_next


def require_plain(value: Any, place: str = "") -> None:
    """Refuse objects that cannot be read without running code.

    Raises:
        TaskError: an object is no tensor and no plain value; names its place.
    """
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            require_plain(key, place)
            require_plain(item, f"{place}.{key}" if place else str(key))
    elif type(value) in (list, tuple, set):
        for i, item in enumerate(value):
            require_plain(item, f"{place}[{i}]")
    else:
        raise TaskError(
            f"The checkpoint's {place} is of type"
            f" {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds only tensors"
            " and plain values, since it is read without running code."
            f" {_OF_OPTIMIZERS if place.startswith('optimizers') else _OF_OTHERS}"
        )


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a plain tensor of the host to its bytes; leave other objects unchanged."""
        if (
            type(value) is not Tensor
            or value.requires_grad
            or value.device.type != "cpu"
            or value.layout is not torch.strided
        ):
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def pack(tree: Any) -> bytes:
    """Return a tree as bytes. Tensors come back contiguous."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(tree)
    return file.getvalue()


def unpack(packed: bytes | memoryview) -> Any:
    """Return a new copy of the packed tree.
    Only for bytes that this run has packed: unpickling runs code.
    """
    return pickle.loads(packed)
