"""Hooks that are set on an instance while it trains:
refused, since a run reads them once, before its first step.
"""

from __future__ import annotations

from typing import Any

from trainkit.errors import TaskError


class FixedHooks:
    """Part of Task and Callback: refuses to set a hook that would never be called.

    Steps (`training_step` and its kin) are looked up at each call, and may be set at any time.
    """

    _hooks_are_read = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            TaskError: it is a hook, and the run that is in progress has read the hooks.
        """
        if (
            name.startswith("on_")
            and self._hooks_are_read
            and callable(getattr(type(self), name, None))
        ):
            own = type(self).__name__
            raise TaskError(
                f"{own}.{name} is set on the instance while it trains: it would never be called,"
                " since hooks are read after setup. Set it before, or let the hook itself choose"
                " what it does."
            )
        super().__setattr__(name, value)

    def _fix_hooks(self, fixed: bool) -> None:
        self.__dict__["_hooks_are_read"] = fixed
