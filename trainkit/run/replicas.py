"""Replicas: what must be equal on all ranks is compared before the first step.

    settings    once the engine has started: versions, the Trainer's options, config, callbacks, hyper-parameters, source of
                Task and data
    data        before feeds are made: kind, length and batch size of the training data
    model       before an engine sends or splits weights: shapes
    optimizers  before the first step: optimizers, schedules, validation data

One hash of each is gathered. Only if hashes differ are the facts exchanged, and all ranks raise the
same error. Left out is what may differ: a rank's numbers and device, hosts, folders, loggers and
what else only shows (Callback.may_differ), callbacks of the user's own, values that come from the
environment, and data that trainkit.sharded declares.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Subset

from trainkit.api.callback import Callback
from trainkit.api.options import Options
from trainkit.api.task import Task
from trainkit.data.loader import Source
from trainkit.data.streams import Sharded
from trainkit.engine.base import Engine
from trainkit.engine.collectives import Collectives
from trainkit.errors import DivergenceError
from trainkit.optim.forms import ScheduleConfig
from trainkit.version import __version__

Facts = dict[str, str]
_GROUPS = ("batch", "limits", "evaluation", "numerics", "samples")
# The last word of keys that may differ between ranks.
_OF_A_RANK = {
    *(
        "rank",
        "local_rank",
        "global_rank",
        "node_rank",
        "local_size",
        "device",
        "device_id",
        "gpu",
        "gpu_id",
        "gpus",
    ),
    *("host", "hostname", "run_dir", "dirpath", "init_weights", "pid", "trust"),
}
_OF_OTHERS = {
    "builtins",
    "torch",
    "trainkit",
    "torchvision",
    "numpy",
    "collections",
    "abc",
    "typing",
}
_NOT_THERE = "(not set)"
_SHOWN = 3
_MOST_CHARACTERS = 120


class Replicas:
    """Compares facts over ranks.

    Args:
        comm: of the ranks.
        kept: facts that this process showed in an earlier attempt of an elastic run; None if there
            is only one attempt. They are shown again: training may have changed the objects, and
            ranks that join later have new ones.
    """

    def __init__(self, comm: Collectives, facts: dict[str, Facts] | None = None) -> None:
        self._comm = comm
        self._kept = facts

    def compare(self, name: str, collect: Callable[[], Facts]) -> None:
        """Compare the facts that `collect` returns. Call it on all ranks; one process compares
        nothing.

        Raises:
            DivergenceError: they differ; on all ranks.
        """
        if self._comm.ranks.world_size == 1 and self._kept is None:
            return
        collected = self._kept if self._kept is not None else {}
        if name not in collected:
            collected[name] = collect()
        facts = collected[name]
        digest = hashlib.sha256(
            json.dumps(facts, sort_keys=True).encode(errors="replace")
        ).hexdigest()
        if len(set(self._comm.all_gather_object(digest))) == 1:
            return
        everyone: list[Facts] = self._comm.all_gather_object(facts)
        keys = list(dict.fromkeys(key for own in everyone for key in own))
        differences = [
            text
            for key in keys
            if (text := _difference(key, [own.get(key, _NOT_THERE) for own in everyone]))
        ]
        more = f" (and {len(differences) - _SHOWN} more)" if len(differences) > _SHOWN else ""
        raise DivergenceError(
            f"Ranks differ in what must be equal on all: {'; '.join(differences[:_SHOWN])}{more}. They"
            " would train different models. Start all ranks with the same command, code and"
            " packages. If each rank reads data of its own, declare it: trainkit.sharded(...)."
        )


def _difference(key: str, values: Sequence[str]) -> str:
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return ""
    return f"{key} is {_cut(values[0])} on rank 0 and {_cut(values[other])} on rank {other}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def settings_of(
    task: Task,
    datamodule: Any,
    options: Options,
    engine: Engine,
    callbacks: Sequence[Callback] = (),
) -> Facts:
    """Return the facts that are known before data are set up."""
    facts = {
        "trainkit's version": __version__,
        "torch's version": str(torch.__version__),
        "engine": engine.name,
    }
    if engine.name == "horovod":
        facts["horovod's version"] = importlib.metadata.version("horovod")
    facts["communication"] = options.communication.describe()
    facts |= flat(
        {
            "trainer": {"seed": options.seed, "fast_dev_run": options.fast_dev_run},
            "engine": engine.shown_options,
        }
    )
    for group in _GROUPS:
        facts |= flat({"trainer": asdict(getattr(options, group))})
    config = options.config or {}
    facts |= flat(
        {key: value for key, value in config.items() if key not in ("logger", "trainer", "hydra")}
    )
    facts |= callbacks_of(callbacks)
    facts["task"] = type(task).__qualname__
    facts |= flat({"hparams": dict(getattr(task, "hparams", {}))})
    if datamodule is not None:
        facts["datamodule"] = type(datamodule).__qualname__
        facts |= flat({"datamodule.hparams": dict(getattr(datamodule, "hparams", {}))})
    targets = [target.rpartition(".")[0] for target in _targets(config)]
    return facts | sources([task, datamodule], targets)


def callbacks_of(callbacks: Sequence[Callback]) -> Facts:
    """Return the kinds of trainkit's callbacks, in order, and what each was constructed with.

    One rank's callback may save or sum at steps at which another's does not: the ranks would wait
    for each other forever. A class of the user's own, whose attributes may be anything, counts by
    the class of trainkit that it extends, if any.
    """
    facts: Facts = {}
    names: list[str] = []
    for callback in callbacks:
        kinds = [
            kind
            for kind in type(callback).__mro__
            if kind.__module__.partition(".")[0] == "trainkit"
        ]
        kind = kinds[0]
        if callback.may_differ or kind is Callback:
            continue
        names.append(kind.__name__)
        count = names.count(kind.__name__)
        place = getattr(kind, "config_key", kind.__name__) + (f" {count}" if count > 1 else "")
        settings = list(inspect.signature(kind).parameters)
        facts |= flat(
            {
                place: {
                    name: getattr(callback, name, getattr(callback, f"_{name}", None))
                    for name in settings
                }
            }
        )
    return {"the list of callbacks": ", ".join(names)} | facts


def data_of(name: str, data: Any, source: Source | None) -> Facts:
    """Return the facts of data under a name;
    of a stream only its kind, and of declared shards nothing else.
    """
    if source is None:
        kind = (
            "sharded" if isinstance(data, Sharded) else "a stream" if data is not None else "none"
        )
        return {name: kind}
    dataset = data.dataset if isinstance(data, DataLoader) else data
    facts: dict[str, Any] = {
        "samples": source.num_samples,
        "batch_size": source.batch_size,
        "shuffle": source.shuffle,
    }
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices)
        facts["indices"] = hashlib.sha256(indices.tobytes()).hexdigest()[:8]
    described = flat(
        {name: {**facts, "drop_last": source.drop_last, "dataset": type(dataset).__qualname__}}
    )
    return described | sources([dataset])


def model_of(task: nn.Module) -> Facts:
    """Return names, shapes and types of all parameters and buffers,
    and the sources of their modules.
    """
    tensors = [*task.named_parameters(), *task.named_buffers()]
    facts = {
        f"shape of {name}": f"{'lazy' if is_lazy(t) else list(t.shape)} {t.dtype}"
        for name, t in tensors
    }
    return facts | sources(task.modules())


def optimizers_of(
    optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[ScheduleConfig]
) -> Facts:
    """Return the settings of each parameter group, and of each schedule."""
    facts: Facts = {}
    for i, optimizer in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {i}"
        facts[name] = type(optimizer).__name__
        for j, group in enumerate(optimizer.param_groups):
            place = name if len(optimizer.param_groups) == 1 else f"{name}.group {j}"
            facts |= flat({place: {**group, "params": len(group["params"])}})
    for i, config in enumerate(schedules):
        name = "lr_scheduler" if len(schedules) == 1 else f"lr_scheduler {i}"
        own = {
            key: value
            for key, value in getattr(config.scheduler, "__dict__", {}).items()
            if not key.startswith("_")
        }
        plan = {
            "kind": type(config.scheduler).__name__,
            "interval": config.interval,
            "frequency": config.frequency,
        }
        facts |= flat({name: own | plan})
    return facts


def sources(objects: Iterable[Any], names: Iterable[str] = ()) -> Facts:
    """Return a hash of each file that defines a class of the objects, or a named module,
    but for those of libraries.
    """
    modules = {
        kind.__module__ for item in objects if item is not None for kind in type(item).__mro__
    } | set(names)
    hashes: Facts = {}
    for name in sorted(name for name in modules if name.partition(".")[0] not in _OF_OTHERS):
        file = getattr(sys.modules.get(name), "__file__", None)
        try:
            text = (
                Path(inspect.getsourcefile(sys.modules[name]) or "").read_bytes() if file else b""
            )
        except (OSError, TypeError):  # compiled, or of a notebook
            continue
        if text:
            hashes[f"the source of {name}"] = hashlib.sha256(text).hexdigest()[:12]
    return hashes


def flat(tree: Any, prefix: str = "") -> Facts:
    """Return {"optimizer.lr": "0.1", ...} of the plain values in a tree,
    but for keys that are a rank's own.
    """
    if prefix.rpartition(".")[2] in _OF_A_RANK:
        return {}
    if isinstance(tree, Mapping):
        return {
            key: text
            for name, part in tree.items()
            for key, text in flat(part, f"{prefix}.{name}".lstrip(".")).items()
        }
    if isinstance(tree, (list, tuple)):
        return {
            key: text
            for i, part in enumerate(tree)
            for key, text in flat(part, f"{prefix}.{i}").items()
        }
    if isinstance(tree, torch.Tensor) and tree.numel() == 1 and tree.device.type == "cpu":
        tree = tree.item()  # a rate as a tensor
    return {prefix: repr(tree) if isinstance(tree, str) else str(tree)} if _is_plain(tree) else {}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, timedelta))


def _targets(tree: Any) -> list[str]:
    if isinstance(tree, Mapping):
        own = [tree["_target_"]] if isinstance(tree.get("_target_"), str) else []
        return own + [target for part in tree.values() for target in _targets(part)]
    return (
        [target for part in tree for target in _targets(part)]
        if isinstance(tree, (list, tuple))
        else []
    )
