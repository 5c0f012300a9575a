"""What hooks receive of a checkpoint that is written or read, and what they may change in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainkit.errors import TaskError
from trainkit.extension import advice


class AbsentEntry(TaskError, KeyError):
    """A hook reads or sets an entry that only Lightning's checkpoints have."""

    __str__ = Exception.__str__  # that of KeyError adds quotes


class Handed(dict[str, Any]):
    """A checkpoint as hooks see it: what they add, `epoch` (in which it was saved), `global_step`,
    and `state_dict`, the weights by name, where those can still be changed.

    Args:
        added: what hooks have added before.
        state: the run's counters.
        weights: returns the weights when a hook reads them.

    Raises:
        AbsentEntry: a hook reads or sets an entry of Lightning's; says what to do.
    """

    def __init__(
        self,
        added: Mapping[str, Any],
        state: Mapping[str, Any],
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        has_ended = state["step_in_epoch"] == 0 and state["current_epoch"] > 0
        about = {"epoch": state["current_epoch"] - has_ended, "global_step": state["global_step"]}
        super().__init__(about | dict(added))
        self._given = {name: value for name, value in about.items() if name not in added}
        self._added = set(added)
        self._weights = weights

    def __missing__(self, name: str) -> Any:
        """Return the weights, or refuse the entry."""
        if name != "state_dict" or self._weights is None:
            _refuse(name)
            raise KeyError(name)
        return self.setdefault(name, dict(self._weights()))

    def __contains__(self, name: object) -> bool:
        """Return whether it has the entry; weights that no hook has read yet too."""
        return super().__contains__(name) or (name == "state_dict" and self._weights is not None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry, or `default` if there is none."""
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """Remove the entry and return it, or `default` if there is none."""
        self.get(name)
        return super().pop(name, *default)

    def split(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Return what hooks added, and the weights if a hook has read or set them.

        Raises:
            TaskError: one of these is no tensor; names it.
        """
        given = self._given.items()
        own = {name: value for name, value in self.items() if (name, value) not in given}
        weights = own.pop("state_dict", None)
        for name in own.keys() - self._added:
            _refuse(name)
        for name, weight in (weights or {}).items():
            if not isinstance(weight, Tensor):
                raise TaskError(
                    f"checkpoint['state_dict']['{name}'] is of class {type(weight).__name__}; it must"
                    f" be a tensor. Keep other things beside the weights: checkpoint['{name}'] = ..."
                )
        return own, weights


def _refuse(name: str) -> None:
    if text := advice("a checkpoint", name):
        raise AbsentEntry(f"checkpoint['{name}'] is not there for a hook{text}")
