"""What a run reads of the state saved beside the weights: compared before anything is loaded.

A checkpoint's hashes tell that it is as it was written; not that a run of this trainkit, or of one
like it, has written it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from trainkit.api.state import TrainState
from trainkit.checkpoint.stateful import check_random_state
from trainkit.data.shares import parse_shares
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.optimizer_state import is_torchs

# A type: of this type. A dict: a mapping with these keys at least. A list: of values like its
# entry.
_COUNTERS: dict[str, Any] = {
    name: {} if isinstance(value, dict) else type(value)
    for name, value in TrainState().state_dict().items()
    if name != "loop_steps"  # older checkpoints lack it
}
_LOG = {"log": {"epoch": {}, "prog_bar": [object]}, "objects": {"states": {}, "logged": {}}}
_SHAPE: dict[str, Any] = {
    "state": _COUNTERS,
    "callbacks": {},
    "optimizers": [{}],
    "rates": {"schedulers": [object], "scheduled": [object], "last": object},
    "scaler": {},
    "values": {"metrics": {}, "at": {}},
    "validations": int,
    "contract": {"world_size": int, "accumulate": int},
    "metrics": [_LOG],
    "random": [{}],
    "extra": {},
}
_OPTIMIZER = {"state": {}, "param_groups": [{"params": [object]}]}
_STRANGE = (
    ConfigError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    OverflowError,
)


def difference(saved: Any) -> str:
    """Return the first thing by which a saved state differs from what a run saves, in words;
    "" if there is none.
    """
    return next(_differences(saved), "")


def _differences(saved: Any) -> Iterator[str]:
    yield from _of_shape(saved, _SHAPE, "")
    yield from _of_shape(saved["state"].get("loop_steps", 0), int, "state/loop_steps")
    yield from (f"'{name}' is empty" for name in ("metrics", "random") if not saved[name])
    for place, state in enumerate(saved["optimizers"]):
        # else it is an optimizer's own form
        if is_torchs(state) or 0 < len(state) == len(_OPTIMIZER.keys() & state.keys()):
            yield from _of_shape(state, _OPTIMIZER, f"optimizers/{place}")
    for rank, state in enumerate(saved["random"]):
        try:
            check_random_state(state)
        except _STRANGE as error:
            yield f"'random/{rank}' is no state of random numbers ({type(error).__name__}: {error})"
    plan = saved["contract"]
    if unknown := sorted(map(str, plan.keys() - {field.name for field in fields(BatchPlan)})):
        yield f"'contract' has {', '.join(unknown)}, which this trainkit does not know"
    try:
        known = BatchPlan(**plan)
        known.at(0).differences(known)
        parse_shares(known.rank_shares)
    except _STRANGE as error:
        yield f"'contract' is no plan of batches ({type(error).__name__}: {error})"


def _of_shape(value: Any, shape: Any, place: str) -> Iterator[str]:
    what = f"'{place}'" if place else "it"
    kind = type(value).__name__
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            yield f"{what} is of type {kind}, not a mapping"
            return
        for key, inner in shape.items():
            at = f"{place}/{key}".lstrip("/")
            yield from _of_shape(value[key], inner, at) if key in value else [f"'{at}' is missing"]
    elif isinstance(shape, list):
        if not isinstance(value, (list, tuple)):
            yield f"{what} is of type {kind}, not a list"
            return
        for i, item in enumerate(value):
            yield from _of_shape(item, shape[0], f"{place}/{i}")
    elif not isinstance(value, shape):
        yield f"{what} is of type {kind}, not {shape.__name__}"
