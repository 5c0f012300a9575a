"""Training data whose DataLoader is changed when a fit asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from trainkit.api.task import Task
from trainkit.errors import ConfigError
from trainkit.run.data_sources import DataSources


@dataclass(frozen=True)
class ChangedLoader(DataSources):
    """See the module.

    Attributes:
        change: returns the DataLoader in place of the user's.
    """

    change: Callable[[DataLoader[Any]], DataLoader[Any]] = lambda loader: loader

    def find(self, kind: str, task: Task) -> Any:
        loader = super().find(kind, task)
        if kind != "train":
            return loader
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"The training data is a {type(loader).__name__}, which has no loader workers."
                " Return a DataLoader."
            )
        return self.change(loader)
