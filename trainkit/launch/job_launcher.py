"""JobLauncher: what `launcher=NAME` of a config names. Its class answers what the command line
asks, which knows no launcher.

A launcher of your own is a class in your project, `launcher: {_target_: my_cluster.MyLauncher,
nodes: 4}`; docs/launchers.md shows one. It is imported to check a config: torch, and what only
`launch` needs, it imports there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class FitConfig:
    """A fit, as its launcher sees it.

    Attributes:
        config: of the fit, resolved.
        engine: its engine's name: "auto", "ddp", ...; "" for a class that says none.
        roles: of its callbacks (Callback.role).
    """

    config: Mapping[str, Any]
    engine: str
    roles: frozenset[str]

    @property
    def settings(self) -> dict[str, Any]:
        """The launcher's own settings."""
        return {key: value for key, value in self.config["launcher"].items() if key != "_target_"}

    @property
    def run_dir(self) -> str:
        """The run's folder."""
        return str(self.config["run_dir"])


class JobLauncher(ABC):
    """Starts the ranks of a fit: as their driver, or by submitting a job. They run the same
    command, as ranks.

    The questions are asked before the launcher is made, with its settings as the config has them: a
    default may be missing. Its ranks take no notice of `launcher=` in their command if they have
    TRAINKIT_LAUNCHER=NAME in their environment.

    Attributes:
        name: as in launcher=NAME, for messages; without one, the class's.
        several: what it does with a job, and what to do with several, after "launcher=NAME" in a
            message.
        runs_elsewhere: whether the run's folder is one of other machines, so that it is not looked
            at here.
        starts_again: what becomes of a job that has lost a node, where it restarts.
        starts_once: the setting with which it does not restart; "" if there is none.
    """

    name: ClassVar[str] = ""
    several: ClassVar[str] = "starts one. Start them one by one."
    runs_elsewhere: ClassVar[bool] = False
    starts_again: ClassVar[str] = "starts again"
    starts_once: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.name = cls.name or cls.__name__

    @classmethod
    def engine_of(cls, settings: Mapping[str, Any]) -> str:
        """Return what engine=auto is on its ranks:
        "horovod" if they need Horovod, "ddp", or "single" for one rank.
        """
        return "ddp"

    @classmethod
    def keeps_ranks(cls, settings: Mapping[str, Any]) -> bool:
        """Return whether the number of ranks stays,
        so that there is nothing for an elastic run to do.
        """
        return True

    @classmethod
    def restarts(cls, settings: Mapping[str, Any]) -> bool:
        """Return whether the job may start several times, and resumes."""
        return False

    @classmethod
    def refuses(cls, fit: FitConfig) -> str | None:
        """Return why it cannot start a fit, and what to do; None if it can."""
        started, keeps = cls.engine_of(fit.settings), cls.keeps_ranks(fit.settings)
        restarts = cls.restarts(fit.settings)
        if fit.engine == "single" and started != "single":
            return (
                f"engine is single, and launcher={cls.name} asks for several ranks: each would"
                f" train alone. Use engine=auto (which is {started} there), or one rank:"
                " launcher.nodes=1."
            )
        if keeps and "elastic" in fit.roles:
            again = f"; a job that loses a node {cls.starts_again}, and resumes" if restarts else ""
            return (
                f"callbacks.elastic is set, and launcher is {cls.name}: its jobs keep their ranks,"
                f" so it has no effect there. Leave it out{again}."
            )
        if restarts and fit.config["trainer"].get("enable_checkpointing") is False:
            instead = (
                f"set {cls.starts_once}" if cls.starts_once else f"leave launcher={cls.name} out"
            )
            return (
                f"trainer.enable_checkpointing is false, and a job of launcher={cls.name} may start"
                " several times: each start would begin from the first step. Save checkpoints, or"
                f" {instead}."
            )
        return None

    @abstractmethod
    def launch(self, fit: FitConfig, arguments: Sequence[str]) -> int:
        """Start the ranks, or submit the job; return the exit code of this process.

        Args:
            fit: what they run.
            arguments: of its command, after "python -m trainkit", as they were typed, without
                run_dir=...

        Raises:
            ConfigError: a setting is not legal.
        """
