"""What a command changes in a run that it starts of the user's config or script: settings of the
Trainer, callbacks, folder and start. All else is the user's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainkit import extension
from trainkit.callbacks import ModelCheckpoint
from trainkit.extensions.script.engine_options import EngineOptions
from trainkit.loggers import CSVLogger
from trainkit.run.build import StartFrom

_QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


@dataclass(frozen=True)
class Changes:
    """See the module.

    Attributes:
        run_dir: of the run.
        settings: of the Trainer, by their names. The engine of a script may be {name: ...,
            options: ...}.
        callbacks: name -> {_target_: dotted name, argument: value}; a callback of the same class is
            replaced.
        loggers: "csv": metrics.csv alone. "none": no logger.
        ckpt_path: the checkpoint to resume; None: as the user has it.
        checkpoints_to: folder in which the user's callbacks save, in place of a dirpath of their
            own; "": they save as they are.
        batch_size: of a config's data; None: as it is.
    """

    run_dir: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loggers: Literal["csv", "none"] = "csv"
    ckpt_path: str | None = None
    checkpoints_to: str = ""
    batch_size: int | None = None

    def write(self, path: Path) -> None:
        """Write them for the process of the run."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Changes:
        """Return what `write` has written."""
        return cls(**json.loads(path.read_text()))

    @property
    def all_settings(self) -> dict[str, Any]:
        """The Trainer's settings, with those that silence a run."""
        return {**_QUIET, **self.settings}

    def given_to_trainer(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a script's Trainer with the changes."""
        callbacks = given.get("callbacks") or []
        own = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        added = [_made(node) for node in self.callbacks.values()]
        kinds = {type(each) for each in added}
        moved = [self._moved(each, place) for place, each in enumerate(own)]
        settings = self.all_settings
        if isinstance(settings.get("engine"), Mapping):
            settings["engine"] = EngineOptions(**settings["engine"]).made()
        return {
            **given,
            **settings,
            "callbacks": [*added, *(each for each in moved if type(each) not in kinds)],
            "logger": [CSVLogger()] if self.loggers == "csv" else False,
            "run_dir": self.run_dir,
        }

    def _moved(self, callback: Any, place: int) -> Any:
        """Return a callback that saves into a folder of its own as one that saves into the run's."""
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
            return callback
        if not self.checkpoints_to:
            return callback
        moved = copy.copy(callback)
        moved.dirpath = f"{self.checkpoints_to}/{place}"
        return moved

    def started(self, start: StartFrom) -> StartFrom:
        """Return the start of a run with the changes: a resumed one takes its checkpoint alone."""
        return start if self.ckpt_path is None else StartFrom(ckpt_path=self.ckpt_path)


def _made(node: Mapping[str, Any]) -> Any:
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    return extension.resolve(extension.current_name(str(node["_target_"])))(**arguments)
