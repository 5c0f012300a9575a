"""Where loggers write their files, by Lightning's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.errors import ConfigError


@dataclass(frozen=True)
class LoggerPlace:
    """Where a logger writes, if it is not the run's folder: `<save_dir>/<name>/<version>`, as
    Lightning's loggers do.

    Attributes:
        save_dir: the folder of all runs; None for the run's own folder.
        name: a folder below it, or None.
        version: the run's folder below that. Default: the name of the run's own folder.
    """

    save_dir: str | None = None
    name: str | None = None
    version: int | str | None = None

    def __post_init__(self) -> None:
        if self.save_dir is None and (self.name, self.version) != (None, None):
            raise ConfigError(
                "A logger's name and version are folders below its save_dir: give that too, or"
                " leave them out."
            )

    def of(self, run_dir: Path, default: str = "") -> Path:
        """Return the folder; `default` is that in the run's own folder."""
        if self.save_dir is None:
            return run_dir / default
        version = (
            f"version_{self.version}"
            if isinstance(self.version, int)
            else self.version or run_dir.name
        )
        return Path(self.save_dir, self.name or "", version).absolute()

    def make(self, run_dir: Path, default: str = "") -> Path:
        """Make the folder, and return it."""
        folder = self.of(run_dir, default)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Placed:
    """A logger that writes files, by Lightning's names.

    Attributes:
        place: see LoggerPlace.
        own_folder: that of the files in the run's own folder, or "".
    """

    place: LoggerPlace
    own_folder = ""
    _folder: Path | None = None  # the run's

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Note the run's folder."""
        self._folder = Path(trainer.run_dir)

    @property
    def save_dir(self) -> str | None:
        """The folder of all runs; without one, the run's own, once it is known."""
        own = None if self._folder is None else str(self._folder)
        return own if self.place.save_dir is None else self.place.save_dir

    @property
    def name(self) -> str:
        """The folder below it, or ""."""
        return self.place.name or ""

    @property
    def version(self) -> int | str:
        """The run's folder below that, or its number;
        without one, the name of the run's own folder.

        Raises:
            ConfigError: there is no run yet, and none was given.
        """
        return self._begun("version").name if self.place.version is None else self.place.version

    @property
    def log_dir(self) -> str:
        """The folder of the files.

        Raises:
            ConfigError: there is no run yet, and the folder is that of one.
        """
        is_known = None not in (self.place.save_dir, self.place.version)
        run_dir = Path() if is_known else self._begun("log_dir")
        return str(self.place.of(run_dir, self.own_folder))

    def _begun(self, name: str) -> Path:
        """Return the run's folder."""
        if self._folder is None:
            raise ConfigError(
                f"{type(self).__name__}.{name} has the run's own folder in it, and there is no run"
                " yet: read it in a hook, or give the logger save_dir and version."
            )
        return self._folder
