"""The differences of two checkpoints, in words.

    differences   the parts that differ
    compare       all parts, equal ones too, each with the number of things compared
    unsteady      values of callbacks and tasks that differ between two equal runs, as a time does
      _values     a checkpoint as part -> name in words -> value
      _first      the first value that differs, leaf by leaf, and how

At the same number of ranks everything must be equal bit for bit. At another one, or on another
engine (`rounding`), the order of sums changes: tensors and rates are compared within BOUNDS, and
rank-local state and an optimizer's implementation are not.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.contents import OWN, TRAINED
from trainkit.checkpoint.format import load_training, read_state
from trainkit.optim.optimizer_state import is_torchs

# The largest difference allowed at another number of ranks, as a share of the tensor's largest
# element: the effect of a few steps of sums in another order, and some digits to spare. State lost
# in a restart moves weights by more.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

# part -> unit of its count
_PARTS = {
    "weights": "tensors",
    "buffers": "tensors",
    "optimizer state": "values",
    "schedules": "values",
    "loss scale": "values",
    "communication": "values",
    "counters": "values",
    "random states": "values",
    "metrics so far": "values",
    "callbacks": "values",
    "kept by hooks": "values",
}
_BOUNDED = ("weights", "buffers", "optimizer state", "schedules")
_OF_RANKS = ("communication", "random states", "metrics so far", "callbacks", "kept by hooks")
# Parts with arbitrary contents.
_OTHERS = ("callbacks", "kept by hooks")
# The list of checkpoints on disk is state of the folder, not of the training.
_PLACES = {"ModelCheckpoint": ("kept", "best", "last", "dropping")}

_IMPLEMENTATIONS = ("fused", "foreach")  # of one update


@dataclass(frozen=True)
class Names:
    """Names for a checkpoint's numbers; without them all tensors are weights, and states are
    numbered.

    Attributes:
        parameters: names in the state_dict that are parameters; the others are buffers.
        optimizers: for each optimizer the names of its parameters, in the order of its groups.
    """

    parameters: frozenset[str]
    optimizers: Sequence[Sequence[str]]


@dataclass(frozen=True)
class ComparedPart:
    """One part of two runs.

    Attributes:
        what: the part, as "weights".
        count: the number of things compared.
        unit: their unit, as "tensors".
        first: the first difference in words, or None.
        left_out: the reason for not comparing it, or None.
    """

    what: str
    count: int
    unit: str
    first: str | None = None
    left_out: str | None = None


def differences(
    a: Path, b: Path, *, rounding: bool = False, names: Names | None = None
) -> list[ComparedPart]:
    """Return the parts in which two checkpoints differ; see `compare`."""
    return [
        part for part in compare(a, b, rounding=rounding, names=names) if part.first is not None
    ]


def compare(
    a: Path,
    b: Path,
    *,
    rounding: bool = False,
    names: Names | None = None,
    ignored: Collection[str] = (),
) -> list[ComparedPart]:
    """Compare two checkpoints with their training state.

    Args:
        rounding: their numbers of ranks or engines differ: compare within BOUNDS, and without
            rank-local state.
        ignored: values to skip, as named by `unsteady`.

    Raises:
        CheckpointError: one of them holds only weights, or is damaged.
    """
    left, right = (_values(folder, names, rounding) for folder in (a, b))
    parts = []
    for what, unit in _PARTS.items():
        if rounding and what in _OF_RANKS and (what != "communication" or left[what]):
            parts.append(
                ComparedPart(what, 0, unit, left_out="local to a rank, and the ranks differ")
            )
            continue
        one, other = (
            {k: v for k, v in side[what].items() if k not in ignored} for side in (left, right)
        )
        if one or other:
            bounds = BOUNDS if rounding and what in _BOUNDED else None
            parts.append(
                ComparedPart(
                    what, sum(1 for _ in _leaves(one, other, "")), unit, _first(one, other, bounds)
                )
            )
    return parts


def unsteady(a: Path, b: Path) -> list[str]:
    """Return the values of callbacks and tasks that differ in
    two checkpoints that should be equal.
    """
    left, right = (_values(folder, None, False) for folder in (a, b))
    return [
        key
        for what in _OTHERS
        for key, value in left[what].items()
        if _first(value, right[what].get(key), None)
    ]


Bounds = Mapping[torch.dtype, float] | None


def _first(a: Any, b: Any, bounds: Bounds) -> str | None:
    for place, left, right in _leaves(a, b, ""):
        if (text := _unlike(left, right, bounds)) is not None:
            return f"{place}: {text}" if place else text
    return None


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def _leaves(a: Any, b: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves of two nested values side by side, each with its place;
    _NOTHING stands for a missing one.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _leaves(
                a.get(key, _NOTHING), b.get(key, _NOTHING), f"{place}.{key}" if place else str(key)
            )
    elif (
        isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and max(len(a), len(b)) <= 16
    ):
        for i in range(max(len(a), len(b))):
            yield from _leaves(
                a[i] if i < len(a) else _NOTHING, b[i] if i < len(b) else _NOTHING, f"{place}[{i}]"
            )
    else:  # a long list is one value: the numbers of a generator's state
        yield place, a, b


def _unlike(a: Any, b: Any, bounds: Bounds) -> str | None:
    """Describe the difference of two leaves, or return None.
    Without bounds the sign of a zero counts.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _unlike_tensors(a, b, bounds)
    if isinstance(a, float) and isinstance(b, float):
        near = bounds is not None and math.isclose(a, b, rel_tol=bounds[torch.float32])
        same = (
            near or struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
        )
        return None if same else f"{a!r} and {b!r}"
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        texts = [text for x, y in zip(a, b, strict=True) if (text := _first(x, y, bounds))]
        return f"{len(texts)} of {len(a)} numbers differ, the first: {texts[0]}" if texts else None
    return None if type(a) is type(b) and a == b else f"{_shown(a)} and {_shown(b)}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unlike_tensors(a: Tensor, b: Tensor, bounds: Bounds) -> str | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} of shape {list(a.shape)} and {b.dtype} of shape {list(b.shape)}"
    left, right = (
        (t if t.layout is torch.strided else t.to_dense()).contiguous().reshape(-1) for t in (a, b)
    )
    if not len(left):
        return None
    bound = None
    if bounds is None or not a.is_floating_point():
        # By their bits: NaN equals NaN, and 0 differs from -0.
        unlike = (left.view(torch.uint8) != right.view(torch.uint8)).reshape(len(left), -1).any(1)
    else:
        bound = bounds[a.dtype] * float(left.nan_to_num(0.0, 0.0, 0.0).abs().max())
        alike = (
            (left == right)
            | (left.isnan() & right.isnan())
            | ((left.double() - right.double()).abs() <= bound)
        )
        unlike = ~alike
    places = unlike.nonzero().reshape(-1)
    if not len(places):
        return None
    first = int(places[0])
    where = f" at {[int(i) for i in torch.unravel_index(places[0], a.shape)]}" if a.dim() else ""
    text = (
        f"{len(places)} of {len(left)} elements differ, the first{where}: {left[first].item()!r}"
        f" and {right[first].item()!r}"
    )
    return text if bound is None else f"{text} (allowed: {bound:.1e})"


def _values(folder: Path, names: Names | None, rounding: bool) -> dict[str, dict[str, Any]]:
    weights, training = read_state(folder), load_training(folder)
    is_buffer = {name: names is not None and name not in names.parameters for name in weights}
    counters = training["state"].items()
    return {
        "weights": {
            f"weight {name}": tensor for name, tensor in weights.items() if not is_buffer[name]
        }
        | {f"trained weight {name}": t for name, t in training.get(TRAINED, {}).items()},
        "buffers": {
            f"buffer {name}": tensor for name, tensor in weights.items() if is_buffer[name]
        },
        "optimizer state": _optimizers(
            training["optimizers"], names, _IMPLEMENTATIONS if rounding else ()
        ),
        "schedules": {f"schedule, {key}": value for key, value in training["rates"].items()},
        "loss scale": {f"loss scale, {key}": value for key, value in training["scaler"].items()},
        "communication": (
            {
                f"communication, {key}": value
                for key, value in training.get("communication", {}).items()
            }
            | _by_rank(training.get(OWN, []), "communication")
        ),
        # A rank's microbatches change with the number of ranks.
        "counters": {
            f"counter {key}": value
            for key, value in counters
            if not (rounding and key == "batch_idx")
        },
        "random states": _by_rank(training["random"], "random state"),
        "metrics so far": (
            _by_rank(training.get("metrics", []), "metrics")
            | {f"metrics, {key}": value for key, value in training.get("values", {}).items()}
        ),
        "callbacks": dict(_callbacks(training["callbacks"])),
        "kept by hooks": {
            f"on_save_checkpoint's {key}": value for key, value in training["extra"].items()
        },
    }


def _optimizers(
    states: Sequence[Mapping[str, Any]], names: Names | None, ignored: Collection[str]
) -> dict[str, Any]:
    """Return "optimizer 0, exp_avg of model.0.weight" -> value."""
    values: dict[str, Any] = {}
    for i, saved in enumerate(states):
        called = names.optimizers[i] if names is not None and i < len(names.optimizers) else []
        if not is_torchs(saved):
            values |= {f"optimizer {i}, {key}": value for key, value in saved.items()}
            continue
        for number, state in saved["state"].items():
            if not isinstance(number, int) or not isinstance(state, Mapping):  # beside the weights'
                values[f"optimizer {i}, {number}"] = state
                continue
            name = called[number] if number < len(called) else f"parameter {number}"
            values |= {f"optimizer {i}, {key} of {name}": value for key, value in state.items()}
        for number, group in enumerate(saved["param_groups"]):
            settings = {key: value for key, value in group.items() if key not in ignored}
            values |= {
                f"optimizer {i}, {key} of group {number}": value for key, value in settings.items()
            }
    return values


def _by_rank(values: Sequence[Mapping[str, Any]], one: str) -> dict[str, Any]:
    """Return "random state of rank 1 (numpy)" -> value."""
    return {
        f"{one} of rank {rank} ({key})": item
        for rank, value in enumerate(values)
        for key, item in value.items()
    }


def _callbacks(states: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield ("state of EarlyStopping.0, wait_count", value)."""
    for key, state in states.items():
        skipped = _PLACES.get(re.split(r"[.{]", key)[0], ())
        yield from (
            (f"state of {key}, {name}", value)
            for name, value in state.items()
            if name not in skipped
        )
