"""Weights & Biases, also offline (WANDB_MODE=offline). The only home of wandb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from trainkit.arguments import checked
from trainkit.errors import ConfigError
from trainkit.loggers.base import Logger

if TYPE_CHECKING:
    from trainkit.task import Task
    from trainkit.trainer import Trainer


@checked
class WandbLogger(Logger):
    """Logs to W&B; its files lie in `<run_dir>/wandb/`. Needs the extra: `pip install trainkit[wandb]`.

    Args:
        project: the project's name.
        name: the run's name; default: the run folder's.
        entity: the team or user.
        group: puts runs together.
        tags: labels.
        mode: "online", "offline" or "disabled"; default: what WANDB_MODE says, else online.
    """

    def __init__(
        self,
        project: str = "trainkit",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        self.project, self.name, self.entity = project, name, entity
        self.group, self.tags, self.mode = group, tags, mode
        self._id: str | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Forget an earlier run."""
        if stage == "fit":
            self._id = None

    def state_dict(self) -> dict[str, Any]:
        """Return W&B's name for the run, so that a run that goes on is one there too."""
        return {"id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it until the run is opened."""
        self._id = state_dict["id"]

    def open(self, trainer: Trainer) -> None:
        """Start a W&B run, or go on with that of the run's own checkpoint. What is trained anew W&B keeps as it was first.

        Raises:
            ConfigError: wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"WandbLogger needs wandb ({error}). Run: pip install 'trainkit[wandb]'") from error
        goes_on = self._id is not None and trainer.session.goes_on_in_place
        self._run = wandb.init(
            id=self._id if goes_on else None,
            resume="allow" if goes_on else None,
            project=self.project,
            name=self.name or trainer.run_dir.name,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
            dir=str(trainer.run_dir),
            config=trainer.session.hyperparams,
        )
        self._id = self._run.id

    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Hand the numbers to W&B's own process."""
        self._run.log(metrics | {"epoch": epoch, "step": step}, step=step)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Nothing more to write: they went along when the run started."""

    def finalize(self, status: str) -> None:
        """Finish the W&B run."""
        self._run.finish(exit_code=0 if status == "success" else 1)
