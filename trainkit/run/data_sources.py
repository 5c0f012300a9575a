"""The user's data: where it is found, and what is read of it before feeds are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from trainkit.api.datamodule import DataModule
from trainkit.api.task import Task
from trainkit.data.combined import joined
from trainkit.data.loader import Source, read_source
from trainkit.data.splitting import held_by
from trainkit.data.streams import Sharded, StreamSource
from trainkit.device.transfer import count_samples
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.run.replicas import Replicas, data_of


@dataclass(frozen=True)
class DataSources:
    """The data given to an entry point of the Trainer:
    by kind ("train", "val", "test", "predict"), or as a DataModule.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    datamodule: DataModule | None = None

    def __post_init__(self) -> None:
        given = {kind: data for kind, data in self.given.items() if data is not None}
        if (
            self.datamodule is None
            and len(given) == 1
            and hasattr(module := next(iter(given.values())), "train_dataloader")
        ):
            object.__setattr__(self, "given", {})  # in the place of a loader, as Lightning takes it
            object.__setattr__(self, "datamodule", module)
        if self.datamodule is not None and not hasattr(self.datamodule, "train_dataloader"):
            raise ConfigError(
                f"datamodule is a {type(self.datamodule).__name__}; it must be a"
                " trainkit.DataModule. Pass loaders as train_dataloaders, val_dataloaders or"
                " dataloaders."
            )

    def owners(self, task: Task) -> list[Any]:
        """Return the objects to call prepare_data of."""
        return [task] if self.datamodule is None else [task, self.datamodule]

    def find(self, kind: str, task: Task) -> Any:
        """Return the data of a kind: the given one, else the DataModule's, else the Task's.

        Raises:
            ConfigError: both were given.
        """
        given = self.given.get(kind)
        if given is not None and self.datamodule is not None:
            raise ConfigError(
                f"Both {kind}_dataloaders and datamodule were given. Give one of the two."
            )
        if isinstance(given, DataModule):
            raise ConfigError(
                f"{kind}_dataloaders is a DataModule, and loaders were given beside it. Give one of"
                " the two."
            )
        if given is not None:
            return given
        make = getattr(task if self.datamodule is None else self.datamodule, f"{kind}_dataloader")
        return None if make is None else make()


@dataclass(frozen=True)
class TrainingData:
    """The user's data; its data set, None for a stream; one rank's microbatch, None if unknown."""

    data: Any
    source: Source | None
    batch_size: int | None


def read_training_data(
    data: DataSources, task: Task, engine: Engine, replicas: Replicas
) -> TrainingData:
    """Find the training data.

    Raises:
        ConfigError: there is none.
        DivergenceError: ranks have different data.
    """
    loaders = data.find("train", task)
    if loaders is None:
        raise ConfigError(
            "There is no training data: pass train_dataloaders or a datamodule, or give the task a"
            " train_dataloader()."
        )
    loaders = joined(loaders, "train_dataloaders")
    source = read_source(loaders, "train_dataloaders", training=True)
    replicas.compare("data", lambda: data_of("train_dataloaders", loaders, source))
    if source is not None and engine.ranks.world_size > 1:
        _report_differing(source.dataset, engine)
    return TrainingData(loaders, source, batch_size_of(loaders, source, engine))


def _report_differing(dataset: Any, engine: Engine) -> None:
    """Say which rank has other samples in memory than rank 0: a script may have split them."""
    first, *others = engine.comm.all_gather_object(held_by(dataset))
    for rank, own in enumerate(others, 1):
        if names := [name for name in first if own.get(name) != first[name]]:
            engine.ranks.say(
                f"Rank {rank} has other training data than rank 0 ({type(dataset).__name__}."
                f"{names[0]}). Each rank trains on its share of one order of samples: if a script"
                " has split them, a part is never seen. Give all ranks the same samples in the same"
                " order, or say that each has its own: trainkit.sharded(loader)."
            )
            return


def batch_size_of(data: Any, source: Source | None, engine: Engine) -> int | None:
    """Return the microbatch of one rank,
    or None for a stream of unknown or differing batch sizes.
    """
    if source is not None:
        return source.batch_size
    data = data.data if isinstance(data, Sharded) else data
    if isinstance(data, (DataLoader, StreamSource)):
        own = data.batch_size
    else:
        own = count_samples(data[0]) if isinstance(data, Sequence) and data else None
    sizes = engine.comm.all_gather_object(own)  # each rank reads its own stream
    return own if all(size == own for size in sizes) else None
