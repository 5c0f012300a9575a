"""Weights & Biases, also offline (WANDB_MODE=offline). The only home of wandb."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.arguments import PositiveFloat, checked
from trainkit.errors import ConfigError
from trainkit.loggers.base import RunFacts
from trainkit.loggers.checkpoints import CheckpointLogger

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


@checked
class WandbLogger(CheckpointLogger):
    """Logs to W&B; its files lie in `<run_dir>/wandb/`. Needs the extra: `pip install 'trainkit[wandb]'`.

    A run that goes on from its own checkpoint is the same W&B run. What is trained anew W&B keeps as it was first.

    Args:
        project: the project's name.
        name: the run's name; default: the run folder's.
        entity: the team or user.
        group: puts runs together.
        tags: labels.
        mode: "online", "offline" or "disabled"; default: what WANDB_MODE says, else online.
        log_model: upload checkpoints as artifacts of type "model", with the aliases "last" and "best": true those two, where
            the fit ends well; "all" each; false none.
        finish_timeout_s: seconds that the end of a fit waits for W&B.
    """

    config_key = "logger.wandb"

    def __init__(
        self,
        project: str = "trainkit",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        log_model: bool | Literal["all"] = False,
        finish_timeout_s: PositiveFloat = 60.0,
    ) -> None:
        self.project, self.name, self.entity = project, name, entity
        self.group, self.tags, self.mode = group, tags, mode
        self.log_model, self.finish_timeout_s = log_model, finish_timeout_s
        self._id: str | None = None
        self._run: Any = None

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

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Name the run before it is opened: a checkpoint may come first."""
        if self._id is None or not trainer.session.goes_on_in_place:
            self._id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)  # a sweep's agent has named it already
        super().on_fit_start(trainer, task)

    def require(self) -> None:
        """See Logger."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"WandbLogger needs wandb ({error}). Run: pip install 'trainkit[wandb]'") from error
        self._wandb: Any = wandb

    def open(self, run: RunFacts) -> None:
        """Start a W&B run, or go on with that of the run's own checkpoint."""
        self._run = self._wandb.init(
            id=self._id,
            resume="allow" if run.goes_on else None,
            project=self.project,
            name=self.name or run.run_dir.name,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
            dir=str(run.run_dir),
            config=run.hyperparams,
        )

    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Hand the numbers to W&B's own process."""
        self._run.log(metrics | {"epoch": epoch, "step": step, "_timestamp": self.logged_at}, step=step)

    def upload(self, folder: Path, name: str, aliases: tuple[str, ...]) -> None:
        """See CheckpointLogger. W&B copies the folder first, and uploads beside us."""
        artifact = self._wandb.Artifact(f"model-{self._id}", type="model", metadata={"checkpoint": name})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=list(aliases))

    def finalize(self, status: str) -> None:
        """Finish the W&B run."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if status == "success" else 1)
