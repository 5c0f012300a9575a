"""From what the user handed in to what the loop works with: feeds, contract, optimizers. The Trainer calls these in turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from trainkit.api.datamodule import DataModule
from trainkit.api.task import Task
from trainkit.data.feed import AccumulateAt, Feed, MapFeed, StreamFeed
from trainkit.data.loader import ShardedLoader, Source, read_source
from trainkit.data.order import mix
from trainkit.data.plan import StepPlan
from trainkit.data.workers import shield
from trainkit.device.precision import Precision
from trainkit.device.transfer import Mover, count_samples
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError, DataError, TaskError
from trainkit.optim.batch_plan import Accumulation, accumulation_at

Limit = int | float | None


def find_data(kind: str, given: Any, task: Task, datamodule: DataModule | None) -> Any:
    """Return the data for "train", "val", "test" or "predict": those given, else the DataModule's, else the Task's.

    Raises:
        ConfigError: both were given.
    """
    if given is not None and datamodule is not None:
        raise ConfigError(f"Both {kind}_dataloaders and datamodule were given. Give one of the two.")
    if isinstance(given, DataModule):
        raise ConfigError(f"{kind}_dataloaders is a DataModule; pass it as datamodule=...")
    if given is not None:
        return given
    return getattr(task if datamodule is None else datamodule, f"{kind}_dataloader")()


def mover(engine: Engine, precision: Precision, channels_last: bool) -> Mover:
    """Return what puts a batch on this rank's device."""
    return Mover(engine.device, precision.input_dtype, channels_last)


def batch_size_of(data: Any, source: Source | None, engine: Engine) -> int | None:
    """Return the microbatch of one rank, or None for a stream that does not tell, or whose ranks' batches differ."""
    if source is not None:
        return source.batch_size
    if isinstance(data, DataLoader):
        own = data.batch_size
    else:
        own = count_samples(data[0]) if isinstance(data, Sequence) and data else None
    everyone = engine.comm.all_gather_object(own)  # each rank reads a stream of its own
    return own if all(size == own for size in everyone) else None


def train_feed(
    data: Any,
    source: Source | None,
    changes: Accumulation,
    limit: Limit,
    seed: int,
    engine: Engine,
    move: Callable[[Any], Any],
    pad: bool = False,
    declared_ranks: int | None = None,
) -> Feed:
    """Return the feed of training data.

    Args:
        data: what the user handed in.
        source: what was read of it; None for a stream.
        changes: microbatches of a rank in a step, by epoch.
        limit: trainer.limit_train_batches.
        seed: of order and augmentation.
        engine: the ranks.
        move: puts a batch on the device.
        pad: trainer.pad_last_step.
        declared_ranks: the number of ranks that `changes` and `limit` are meant for. Default: as many as there are.

    Raises:
        ConfigError: a limit leaves nothing, or a short last step is to be filled that is dropped or unknown.
        DataError: there are fewer samples than ranks.
    """
    if limit is not None and limit == 0:
        raise ConfigError(f"trainer.limit_train_batches is {limit}; it must be above 0, or null for all.")
    if pad and (source is None or source.drop_last):
        why = (
            "the training data is a stream, whose last step nobody knows" if source is None else "drop_last=True leaves it out"
        )
        raise ConfigError(f"trainer.pad_last_step is true, but {why}. Leave one of the two out.")
    accumulate_at = functools.partial(accumulation_at, changes)
    declared = declared_ranks or engine.ranks.world_size
    if source is None:
        _refuse_own_batches(data, engine)
        return _stream(data, accumulate_at, limit, seed, engine, move, declared / engine.ranks.world_size)
    if source.num_samples < declared:
        raise DataError(
            f"The training data has {source.num_samples} samples for {declared} ranks; each rank needs one at "
            "least. Start fewer ranks."
        )
    samples = _limited(source, limit, declared)
    drop_last = source.drop_last and not (isinstance(limit, int) and samples < source.num_samples)  # full microbatches anyway
    plan = StepPlan(samples, source.batch_size, engine.ranks.world_size, max(n for _, n in changes), drop_last, pad, declared)
    if plan.num_steps == 0:
        raise DataError(
            f"drop_last=True leaves nothing: the training data has {plan.num_samples} samples, a step takes "
            f"{plan.global_batch_size}. Use a smaller batch or drop_last=False."
        )
    return MapFeed(_sharded(source, plan, seed, engine), engine.ranks.rank, move, accumulate_at)


def eval_feeds(
    data: Any,
    name: str,
    limit: Limit,
    seed: int,
    engine: Engine,
    move: Callable[[Any], Any],
    declared_ranks: int | None = None,
) -> list[Feed]:
    """Return a feed for each loader of evaluation data: a single one, or a list or tuple of loaders. See `train_feed`."""
    several = isinstance(data, (list, tuple)) and all(isinstance(item, DataLoader) for item in data) and data
    feeds: list[Feed] = []
    for item in data if several else [data]:
        source = read_source(item, name, training=False)
        if source is None:
            _refuse_own_batches(item, engine)
            feeds.append(_stream(item, lambda epoch: 1, limit, seed, engine, move))
        else:
            source = dataclasses.replace(source, shuffle=False)  # predictions come in the data set's order
            samples = _limited(source, limit, declared_ranks or engine.ranks.world_size)
            plan = StepPlan(samples, source.batch_size, engine.ranks.world_size)
            feeds.append(MapFeed(_sharded(source, plan, seed, engine), engine.ranks.rank, move))
    return feeds


def _refuse_own_batches(data: Any, engine: Engine) -> None:
    """A DataLoader that makes its own batches yields the same ones on every rank: each sample would be used by all."""
    own = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    if own and engine.ranks.world_size > 1:
        raise ConfigError(
            f"The DataLoader makes its own batches (batch_sampler, batch_size=None), and {engine.ranks.world_size} ranks would "
            "each use all of them. Give batch_size and a sampler (they are dealt to the ranks), or an IterableDataset that is "
            "sharded by rank."
        )


def prepare_on_each_host(engine: Engine, prepares: Iterable[Callable[[], None]]) -> None:
    """Run `prepare_data` on the first rank of each host, while the others wait."""
    for prepare in prepares:
        if engine.ranks.local_rank == 0:
            prepare()
    engine.comm.barrier()


def check_parameters(task: Task, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    """Return the task's parameters that no optimizer updates.

    Raises:
        TaskError: an optimizer updates a parameter that is not the task's: nobody would sum its gradient over ranks.
    """
    own = set(task.parameters())
    optimized = {parameter for opt in optimizers for group in opt.param_groups for parameter in group["params"]}
    if strangers := optimized - own:
        shape = list(next(iter(strangers)).shape)
        raise TaskError(
            f"An optimizer updates {len(strangers)} parameters (one of shape {shape}) that are not among "
            f"{type(task).__name__}'s: ranks would drift apart. Keep modules as attributes, or in an nn.ModuleList."
        )
    return [parameter for parameter in task.parameters() if parameter not in optimized]


def place(task: Task, engine: Engine, precision: Precision, channels_last: bool) -> None:
    """Put the weights on this rank's device, in their dtype and layout.

    A buffer whose numbers share memory (`expand`) gets memory of its own: it could not be written, as by a broadcast.

    Raises:
        TaskError: one has no shape yet, or a buffer is sparse, where several ranks are to have the same.
    """
    for name, buffer in task.named_buffers():
        if engine.ranks.world_size > 1 and buffer.layout is not torch.strided:
            raise TaskError(
                f"The buffer '{name}' of {type(task).__name__} is sparse, and ranks cannot send it to one another. Register "
                "its indices and values as two buffers and put them together in forward(), or keep it dense."
            )
    for name, parameter in task.named_parameters():
        if engine.ranks.world_size > 1 and is_lazy(parameter):
            raise TaskError(
                f"'{name}' of {type(task).__name__} has no shape yet (a lazy module), so that ranks cannot agree on it. Run a "
                "batch through the model in __init__ or setup(), or give the module its sizes."
            )
    for module in task.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is torch.strided and any(
                n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                setattr(module, name, buffer.clone(memory_format=torch.contiguous_format))
    precision.convert(task)
    task.to(engine.device)
    if channels_last:
        task.to(memory_format=torch.channels_last)


def _sharded(source: Source, plan: StepPlan, seed: int, engine: Engine) -> ShardedLoader:
    return ShardedLoader(source, plan, engine.ranks.rank, seed, engine.comm.broadcast_object)


def _stream(
    data: Any,
    accumulate_at: AccumulateAt,
    limit: Limit,
    seed: int,
    engine: Engine,
    move: Callable[[Any], Any],
    share: float = 1.0,
) -> StreamFeed:
    if isinstance(limit, float):
        raise ConfigError(f"A limit of {limit} is a share, but the data is a stream without length. Give a number of batches.")
    lengths = engine.comm.all_gather_object(_length_of(data))  # schedules count the same steps on all ranks
    length = None if None in lengths else max(lengths)
    return StreamFeed(
        shield(data), length, accumulate_at, limit, engine.comm.sum_number, move, mix(seed, engine.ranks.rank), share
    )


def _length_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:  # a DataLoader has __len__, and its iterable data set may have none
        return None


def _limited(source: Source, limit: Limit, world_size: int) -> int:
    """Return the samples that are left under a limit: a count of microbatches of each rank, or a share of the data."""
    if limit is None:
        return source.num_samples
    if isinstance(limit, float):
        return max(1, int(source.num_samples * limit)) if limit > 0 else 0
    return min(source.num_samples, limit * source.batch_size * world_size)
