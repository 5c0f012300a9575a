"""What checkpoints hold of optimizers: their states, each weight's under its name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.device.shards import is_spread
from trainkit.optim.scheduler_state import NO_SETTINGS, settings_of

_CLASS = "__tensor_class__"  # a key of a mapping that stands for a tensor of a class of its own


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state; tensors share its memory. One of a class of its own (torchao's
    of 8 bits) is given as the plain tensors it is made of: a checkpoint is read without running
    others' code.
    """
    state: dict[str, Any] = tree_map(_in_plain, optimizer.state_dict())
    return state


def is_torchs(state: Mapping[str, Any]) -> bool:
    """Return whether a state has torch's form, and none of its optimizer's own."""
    return "state" in state and "param_groups" in state


def parts_beside(state: Mapping[str, Any], are_stages: bool = False) -> list[str]:
    """Return the entries with tensors of which ranks hold parts, beside the weights' own states:
    a run that resumes could fill none.

    Args:
        are_stages: of a model, of whose weights each rank has some.
    """
    if are_stages and (own := sorted(state.keys() - {"state", "param_groups"})):
        return own
    entries = dict(state)
    if is_torchs(state):
        entries |= {
            "state": {key: v for key, v in state["state"].items() if not isinstance(key, int)}
        }
    return [key for key, value in entries.items() if any(map(_is_part, tree_leaves(value)))]


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and is_spread(value)


def _in_plain(value: Any) -> Any:
    if not isinstance(value, Tensor) or type(value) is Tensor or is_spread(value):
        return value
    if not is_traceable_wrapper_subclass(value):
        return value
    names, context = value.__tensor_flatten__()
    return {
        _CLASS: f"{type(value).__module__}.{type(value).__qualname__}",
        "tensors": {name: _in_plain(getattr(value, name)) for name in names},
        "context": context,
        "sizes": (value.size(), value.stride()),
    }


def _is_in_plain(value: Any) -> bool:
    return isinstance(value, dict) and _CLASS in value


def _rebuilt(value: Any) -> Any:
    """Return the tensor of a class of its own. Only a class that is imported is called."""
    if not _is_in_plain(value):
        return value
    module, _, name = value[_CLASS].rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise ValueError(f"it has tensors of {value[_CLASS]}, which is not imported here")
    tensors = {name: _rebuilt(tensor) for name, tensor in value["tensors"].items()}
    return kind.__tensor_unflatten__(tensors, value["context"], *value["sizes"])  # type: ignore[attr-defined]


def dtypes_of(optimizer: Optimizer) -> list[list[str]]:
    """Return the dtypes of the weights of each group."""
    weights = [group["params"] for group in optimizer.param_groups]
    return [sorted({str(weight.dtype) for weight in group}) for group in weights]


def has_other_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> bool:
    """Return whether the weights had other dtypes when a state was saved, or it does not say: an
    older one.
    """
    groups = saved["param_groups"] if is_torchs(saved) else ()
    return [group.get("param_dtypes") for group in groups] != dtypes_of(optimizer)


def load_state(optimizer: Optimizer, state: dict[str, Any], casts: bool = False) -> None:
    """Load an optimizer's state, of `state_of`.

    Tensors of it have the dtype they were saved in (float32 of bfloat16 weights; NAdam's
    mu_product, ASGD's eta): torch casts them to the weights', and the run would round otherwise
    from there on. A rate that is a tensor stays this tensor, with the saved value; one that is a
    number stays one.

    Args:
        casts: of weights that had another dtype: scalars alone have the saved one.

    Raises:
        ValueError: it does not fit the optimizer.
    """
    state = tree_map(_rebuilt, state, is_leaf=_is_in_plain)
    rates = [group.get("lr") for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    groups = state["param_groups"] if is_torchs(state) else ()
    places = [place for group in groups for place in group["params"]]
    for place, weight in zip(places, weights, strict=False):
        own, saved = optimizer.state.get(weight, {}), state["state"].get(place, {})
        for name in own.keys() & saved.keys():
            own[name] = _in_saved_dtype(own[name], saved[name], casts, weight.dim())
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(rate, Tensor):
            rate.detach().fill_(float(group["lr"]))
            group["lr"] = rate
        elif isinstance(group.get("lr"), Tensor):
            group["lr"] = float(group["lr"])


def _in_saved_dtype(loaded: Any, saved: Any, casts: bool, dimensions: int) -> Any:
    """Return a value of the state of a weight of so many dimensions, or a list or mapping of such,
    with tensors in the dtype they were saved in; if it `casts`, scalars and integers alone.
    """
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        is_scalar = saved.dim() == 0 < dimensions
        is_kept = loaded.dtype != saved.dtype and not (casts and saved.is_floating_point())
        return saved.to(loaded.device, copy=True) if is_scalar or is_kept else loaded
    if type(loaded) is not type(saved):
        return loaded
    if type(loaded) is dict and loaded.keys() == saved.keys():
        pairs = ((key, one, saved[key]) for key, one in loaded.items())
        return {key: _in_saved_dtype(one, old, casts, dimensions) for key, one, old in pairs}
    if type(loaded) in (list, tuple) and len(loaded) == len(saved):
        each = zip(loaded, saved, strict=True)
        return type(loaded)(_in_saved_dtype(one, old, casts, dimensions) for one, old in each)
    return loaded


def in_order(saved: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
    """Return a saved state without the names in `param_names` (torch's key) and without
    `param_dtypes`, each weight's part of it at the place that the weight of this name has now:
    torch goes by places alone. If it has other names, all stay at their places.

    Args:
        names: the optimizer's weights, in its order; None for one that is not the task's.
    """
    if not is_torchs(saved):
        return dict(saved)
    groups = [dict(group) for group in saved["param_groups"]]
    for group in groups:
        group.pop("param_dtypes", None)
    there = [name for group in groups for name in group.pop("param_names", ())]
    places = {name: place for place, name in enumerate(names)}
    moved: dict[Any, int] = {}
    if places.keys() == {*there} and len(places) == len(there) == len(names):
        moved = {place: places[name] for place, name in enumerate(there)}
    state = {moved.get(place, place): value for place, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def lacking(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """Return the names that a step of this optimizer reads of a parameter's state, and that a saved
    state lacks: another class has written it, or amsgrad was off.

    Groups of the same settings are not compared, nor are classes that are not torch's.
    """
    names = set[str]()
    groups = saved["param_groups"] if is_torchs(saved) else ()
    for old, group in zip(groups, optimizer.param_groups, strict=False):
        if len(old["params"]) != len(group["params"]) or settings_of(old, 0) == settings_of(
            group, 0
        ):
            continue
        pairs = zip(group["params"], old["params"], strict=True)
        parameter, index = min(pairs, key=lambda pair: pair[0].numel())
        if there := saved["state"].get(index):
            names |= _state_names(optimizer, group, parameter) - there.keys()
    return sorted(names)


def _state_names(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> set[str]:
    """Return what one step of a new optimizer of the same class leaves for a parameter."""
    kind = type(optimizer)
    others = (torch.optim.LBFGS, torch.optim.SparseAdam)  # their steps need more than a gradient
    if vars(torch.optim).get(kind.__name__) is not kind or kind in others:
        return set()
    probe = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
    probe.grad = torch.zeros_like(probe)
    own = {name: value for name, value in group.items() if name not in NO_SETTINGS}
    taken = inspect.signature(kind).parameters.keys() & optimizer.defaults.keys()
    given = {name: optimizer.defaults[name] for name in taken - {*NO_SETTINGS}}
    new = kind([{**own, "params": [probe]}], **given)
    new.step()
    return set(new.state[probe])
