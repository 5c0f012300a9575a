"""A Task's model: its layers, made by Task.configure_model, and its first weights.

make_model      before anything reads the layers; without memory if the engine splits the weights
is_in_parts     whether weights are filled in parts
load_whole      weights from a file, on rank 0, which sends them (engine.prepare)
fill_parts      first weights, or those of a file, in what this rank holds of a model that the engine has split
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from trainkit.api.layers import LayerChange, change_layers
from trainkit.api.task import Task
from trainkit.checkpoint.places import local_copy
from trainkit.checkpoint.weights import compare, load_into, read_config, read_weights
from trainkit.device.shards import is_spread
from trainkit.engine.base import Engine
from trainkit.engine.deferred.record import Record
from trainkit.engine.deferred.values import Deferred
from trainkit.engine.pieces import fill, filling
from trainkit.errors import CheckpointError, TaskError


def make_model(task: Task, engine: Engine, changes: Sequence[LayerChange] = ()) -> None:
    """Let the Task make its layers, unless it has, and a callback replace some.

    If the engine splits weights, those of `configure_model` stay without memory until `fill_parts`,
    which computes them with rank 0's random numbers on all ranks; not if a callback replaces layers,
    which needs their weights.
    """
    if (
        task._has_model
        or type(task).configure_model is Task.configure_model
        or not engine.splits_weights
        or engine.ranks.is_elastic  # ranks that join later have made it before they joined
        or changes
    ):
        task._make_model()
        change_layers(task, changes, engine.comm.run_on_main)
        _refuse_wrapped(task, engine)
        return
    torch.set_rng_state(engine.comm.broadcast_object(torch.get_rng_state()))
    record = Record()
    with record.recording():
        task._make_model()
    task._first_weights = Deferred(task, record)


def _refuse_wrapped(task: Task, engine: Engine) -> None:
    """Refuse torch's own wrapper within a Task on several ranks.

    Raises:
        TaskError: there is one.
    """
    if engine.ranks.world_size == 1:
        return
    for name, module in task.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise TaskError(
                f"{type(task).__name__}.{name} is a DistributedDataParallel, and gradients are summed"
                f" over ranks without it: it would send each a second time. Give the model in it,"
                f" {name}.module."
            )


def is_in_parts(task: Task) -> bool:
    """Return whether this rank holds parts of the model, or will:
    it is split, or was made without memory.
    """
    return any(parameter.is_meta or is_spread(parameter) for parameter in task.parameters())


def load_whole(task: Task, path: str, strict: bool = True) -> list[str]:
    """Load weights from a file, folder or URL into a Task that this rank holds all of;
    return what does not match.
    """
    with local_copy(path) as local:
        differing = compare(task.compare_config, read_config(local), path, strict)
        weights = task.translate_weights(read_weights(local))
        try:
            return differing + load_into(task, weights, path, strict)
        except CheckpointError as error:
            if task._layers_of is None:
                raise
            raise CheckpointError(f"{error}\n{task._layers_of.what_weights_are}") from error


def fill_parts(task: Task, engine: Engine, path: str | None, strict: bool = True) -> list[str]:
    """Fill what this rank holds of a Task's weights; call it on all ranks.

    Args:
        path: a file, folder or URL of weights that replace the first ones; each rank reads it.

    Returns:
        What does not match.

    Raises:
        CheckpointError: a rank cannot read the file, or it does not fit; on all ranks.
    """
    if task._first_weights is not None:
        parameters = dict(task.named_parameters())
        for name, value in task._first_weights.values():
            fill(engine.piece_of(parameters[name].detach()), value)
        task._first_weights = None
    if path is None:
        return []
    error = ""
    left = []
    try:
        with local_copy(path) as local:
            left = compare(task.compare_config, read_config(local), path, strict)
            left += load_into(
                task,
                task.translate_weights(read_weights(local)),
                path,
                strict,
                filling(engine.piece_of),
            )
    except (CheckpointError, OSError) as failed:
        error = str(failed)
    failures = [
        (rank, text) for rank, text in enumerate(engine.comm.all_gather_object(error)) if text
    ]
    if failures:
        rank, text = failures[0]
        raise CheckpointError(
            text
            if rank == 0
            else f"Rank {rank} (each reads its part of the weights, on its host): {text}"
        )
    return left
