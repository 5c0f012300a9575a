"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import array
import io
import pickle
import platform
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.errors import CheckpointError, TaskError
from trainkit.metrics import objects as metric_objects
from trainkit.version import __version__

if TYPE_CHECKING:
    from trainkit.loop import Run

# What a reader that runs no code can build again. By exact type: numpy.float64 is a float, and is refused when read.
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}


def own_part(run: Run) -> dict[str, Any]:
    """Return what a checkpoint keeps of this rank alone. Waits for the device where values are still being computed."""
    log = {"log": run.log.state_dict(), "objects": metric_objects.state_of(run.task, run.log.objects)}
    return {"random": random_state(), "metrics": log}


def gather(run: Run, others: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collect everything but the weights.

    Args:
        run: what the loop works with.
        others: what callbacks and hooks keep: `of_callbacks`.
        ranks: each rank's `own_part`; none where `with_ranks` adds them later.

    Returns:
        Tensors and plain values, for `format.write`.

    Raises:
        TaskError: something else is among them, which no reader would take; names it.
    """
    contents = {
        "state": run.state.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "rates": run.rates.state_dict(),
        "scaler": run.precision.scaler.state_dict(),
        **_of_ranks(ranks),
        "values": {"metrics": dict(run.metrics), "at": dict(run.metrics_at)},
        **others,
    }
    _require_plain(contents, "")
    return contents


def of_callbacks(callbacks: Sequence[Callback], extra: dict[str, Any]) -> dict[str, Any]:
    """Return what callbacks keep, by class name and place, and what hooks have added (`extra`).

    Raises:
        TaskError: as `gather`.
    """
    kept = {"callbacks": {key: callback.state_dict() for key, callback in _keyed(callbacks)}, "extra": extra}
    _require_plain(kept, "")
    return kept


def _of_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"random": [part["random"] for part in ranks], "metrics": [part["metrics"] for part in ranks]}


def packed_part(own: dict[str, Any], others: dict[str, Any] | None) -> bytes:
    """Return `own_part` for a commit; on rank 0 with what callbacks keep there, who alone know of the run's files."""
    return pack(own if others is None else own | {"of_rank_0": without_tensors(others)})


def with_ranks(contents: dict[str, Any], packed: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Return what `gather` has collected of no ranks, with the `packed_part` of each: any rank can go on from it as rank 0."""
    ranks = [unpack(part) for part in packed]
    others: dict[str, Any] = with_tensors(ranks[0]["of_rank_0"], contents)
    return contents | _of_ranks(ranks) | others


_SMALL_BYTES = 1 << 20  # of a tensor that a callback may have on rank 0 alone


class _Tensor:
    """Stands where a tensor was; the class itself, which is pickled by name."""


def without_tensors(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples whose large tensors are left out; those are equal on all ranks."""
    if isinstance(tree, torch.Tensor):
        return _Tensor if tree.numel() * tree.element_size() > _SMALL_BYTES else tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: without_tensors(value) for key, value in tree.items()}
    return type(tree)(map(without_tensors, tree)) if type(tree) in (list, tuple) else tree


def with_tensors(tree: Any, own: Any) -> Any:
    """Return what `without_tensors` has left, with the tensors of `own` in their places (None where it has none)."""
    if tree is _Tensor:
        return own
    if isinstance(tree, dict):
        there = own if isinstance(own, dict) else {}
        return {key: with_tensors(value, there.get(key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        held = list(own)[: len(tree)] if isinstance(own, (list, tuple)) else []
        return type(tree)(map(with_tensors, tree, [*held, *[None] * (len(tree) - len(held))]))
    return tree


def restore(run: Run, callbacks: Sequence[Callback], saved: Mapping[str, Any]) -> list[str]:
    """Put a run where `gather` found it.

    The optimizers' state is put back where `saved` has it: rank 0 alone needs it, since `engine.prepare` sends it on.

    Returns:
        What could not be put back, in words: states of callbacks that this run does not have, and the like.

    Raises:
        CheckpointError: it belongs to other optimizers.
    """
    run.state.load_state_dict(saved["state"])
    if len(saved["optimizers"]) != len(run.optimizers):
        raise CheckpointError(
            f"The checkpoint has {len(saved['optimizers'])} optimizers, this task {len(run.optimizers)}: they do not fit."
        )
    for optimizer, state in zip(run.optimizers, saved["optimizers"], strict=True):
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(f"The checkpoint's optimizer state does not fit this task: {error}.") from error
    run.rates.load_state_dict(saved["rates"], run.state.global_step - run.state.skipped_steps)
    if run.precision.scaler.is_enabled() and saved["scaler"]:
        run.precision.scaler.load_state_dict(dict(saved["scaler"]))
    kept = dict(saved["callbacks"])
    for key, callback in _keyed(callbacks):
        if key in kept:
            callback.load_state_dict(kept.pop(key))
    run.metrics.update(saved["values"]["metrics"])
    run.metrics_at.update(saved["values"]["at"])
    engine, ranks = run.engine, saved["metrics"]
    run.log.load_state_dict([part["log"] for part in ranks], engine.ranks.rank, engine.ranks.world_size, engine.device)
    objects = [part["objects"] for part in ranks]
    lost = metric_objects.restore(run.task, run.log.objects, objects, engine.ranks.rank, engine.ranks.world_size)
    states = saved["random"]
    if len(states) == engine.ranks.world_size:  # at another number of ranks there is nothing to give each
        set_random_state(states[engine.ranks.rank])
    return [*_left(kept), *(f"the metric '{name}' (make it an attribute of the Task, and it is kept)" for name in lost)]


def _left(kept: Mapping[str, Any]) -> list[str]:
    """Name the callbacks whose state nobody has taken. Without a ModelCheckpoint or a logger a run goes on just as well."""
    names = {key: key.partition(".")[0] for key, state in kept.items() if state}
    told = []
    for key, name in names.items():
        average = kept[key].get("average") if isinstance(kept[key], Mapping) else None
        hint = " (the saved weights are its averages: add it to go on from the trained ones)"
        averages = isinstance(average, Mapping) and average.get("aside") is not None
        if name != "ModelCheckpoint" and not name.endswith("Logger"):
            told.append(f"the state of {name}{hint * averages}")
    return told


def versions() -> dict[str, str]:
    """Return the versions that a reader of a checkpoint may ask for."""
    return {"trainkit": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def random_state() -> dict[str, Any]:
    """Return this process's random states as tensors and plain values."""
    drawn = np.random.get_state(legacy=False)
    version, numbers, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "numpy": [
            str(drawn["bit_generator"]),
            torch.from_numpy(drawn["state"]["key"].astype(np.int64)),
            *(float(drawn[name] if name in drawn else drawn["state"][name]) for name in ("pos", "has_gauss", "gauss")),
        ],
        # As one tensor, since 625 numbers would be walked through one by one; and by way of an array, which is fast.
        "python": [version, torch.frombuffer(array.array("q", numbers), dtype=torch.int64), gauss_next],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set this process's random states."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(place), int(has_gauss), gauss))
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss_next))


def _keyed(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    seen: dict[str, int] = {}
    keyed = []
    for callback in callbacks:
        name = type(callback).__name__
        seen[name] = seen.get(name, -1) + 1
        keyed.append((f"{name}.{seen[name]}", callback))
    return keyed


def _require_plain(value: Any, place: str) -> None:
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _require_plain(key, place)
            _require_plain(item, f"{place}.{key}" if place else str(key))
    elif type(value) in (list, tuple, set):
        for i, item in enumerate(value):
            _require_plain(item, f"{place}[{i}]")
    else:
        raise TaskError(
            f"The checkpoint's {place} is of type {type(value).__module__}.{type(value).__qualname__}; a checkpoint keeps "
            "tensors and plain values alone, since it is read without running code. Save float(x), x.tolist() or str(x)."
        )


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a plain tensor of the host to its bytes; leave all else as it is."""
        if type(value) is not Tensor or value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided:
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
    """Return what was packed, as the caller's own; of bytes that this run has packed alone, since unpickling runs code."""
    return pickle.loads(packed)
