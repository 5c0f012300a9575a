"""The latest logged values, and the history of a run's epochs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rich.table import Table

from trainkit.arguments import not_logged
from trainkit.console import show_table


class Number(float):
    """A logged value: a float that also answers to what is asked of a tensor of one number."""

    def item(self) -> float:
        """Return the plain float."""
        return float(self)

    def cpu(self) -> Number:
        """Return it: it is on the host already."""
        return self

    detach = cpu


class EvaluationValues(dict[str, float]):
    """The values of an evaluation, by name;
    `values[0]` is the same, since Lightning returns a list with one dict.
    """

    def __getitem__(self, name: Any) -> Any:
        return self if name == 0 else super().__getitem__(name)

    def show(self, of: str) -> None:
        """Print a table of them, below a line that says of what they are."""
        table = Table(show_header=False)
        for name, value in self.items():
            table.add_row(name, f"{value:.6g}")
        show_table(of, soft_wrap=True)  # a path is not wrapped
        show_table(table)


class LatestMetrics(dict[str, float]):
    """The latest logged values by name, as `trainer.callback_metrics`.

    Attributes:
        logged_at: the step of each value.
        history: the values of each epoch, with its number, last step and rate.
        suffixes: of the names of values of a dict's validation loaders.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logged_at: dict[str, int] = {}
        self.history: list[dict[str, float]] = []
        self.suffixes: set[str] = set()

    def __getitem__(self, name: str) -> Number:
        return Number(super().__getitem__(name))

    def __missing__(self, name: str) -> float:
        raise KeyError(f"trainer.callback_metrics has no {not_logged(name, self)}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as it is read by its name, or the default."""
        value = super().get(name)
        return default if value is None else Number(value)

    def values(self) -> Any:
        """Return the values as they are read by name; `dict(...)` of this has plain floats."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return names and such values."""
        return [(name, self[name]) for name in self]

    def put(self, values: Mapping[str, float], step: int) -> None:
        """Store the values of a step, those of an epoch ("loss_epoch") under the plain name too."""
        both = {name: float(value) for name, value in self.with_plain(values).items()}
        self.update(both)
        self.logged_at |= dict.fromkeys(both, step)

    def with_plain(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return values, those of an epoch under the plain name too."""
        return {plain_name(name, self.suffixes): v for name, v in values.items()} | dict(values)

    def record(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Add an epoch to the history, in place of what was known of it before a run resumed."""
        self.history = [row for row in self.history if row["epoch"] < epoch]
        self.history.append({**values, "epoch": epoch, "step": step})


def plain_name(name: str, suffixes: Collection[str] = ()) -> str:
    """Return the name that `log` was called with, and the loader's suffix:
    it adds "_epoch" if a value is logged by step too.
    """
    suffix = next(filter(name.endswith, suffixes), "")
    own, slash, loader = name.removesuffix(suffix).partition("/dataloader_idx_")
    return own.removesuffix("_epoch") + slash + loader + suffix
