"""WandbLogger: logs to Weights & Biases, also offline (WANDB_MODE=offline).
The only home of wandb.
"""

from __future__ import annotations

import functools
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import nn

from trainkit.api.lightning_arguments import unset
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, checked, given_to
from trainkit.device.shards import is_spread
from trainkit.errors import ConfigError
from trainkit.extensions.trackers.checkpoints import CheckpointLogger
from trainkit.extensions.trackers.wandb_media import WandbMedia
from trainkit.loggers.base import RunFacts
from trainkit.metrics.media import Media

_AXIS = "trainer/global_step"


@dataclass
class _Rows:
    """The rows of a W&B run.

    Attributes:
        logged_until: the run's last step that an earlier start of it has logged.
        axis: the step of the last row.
        last: W&B's own count at it.
    """

    logged_until: int = -1
    axis: int = -1
    last: int = -1

    def log(self, run: Any, values: dict[str, Any], step: int, at: int) -> None:
        """Log values of a step, in a row of its own. A call of the user's own, or an axis, has moved
        W&B's count of steps on: what is before it is dropped, and what has it replaces values.

        Args:
            run: W&B's run.
            values: by name.
            step: on the axis.
            at: the fit's.
        """
        if at <= self.logged_until:
            return
        next_row = run.step
        if next_row == self.last and step != self.axis:
            next_row += 1
        self.axis = step
        self.last = max(at, next_row)
        run.log({_AXIS: step} | values, step=self.last)


@checked
class WandbLogger(WandbMedia, CheckpointLogger):
    """Logs to W&B; its files are in `<save_dir>/wandb/`. Needs the extra: `pip install
    'trainkit[wandb]'`.

    A run resumed from its own checkpoint continues the same W&B run. Of repeated steps the first
    values stay. The x axis is "trainer/global_step", as with Lightning; `experiment.log({...})` of
    a hook counts as of the newest step.

    Args:
        name: name of the run; default: WANDB_NAME if set, else that of the run folder.
        save_dir: the folder of W&B's own files; default: the run's.
        project: name of the project; default: WANDB_PROJECT if set, else "trainkit".
        entity: the team or user.
        group: name under which runs are grouped.
        tags: labels.
        mode: "online", "offline" or "disabled"; default: WANDB_MODE if set, else online.
        log_model: upload checkpoints as artifacts of type "model", with the aliases "last" and
            "best": true those that are there if the fit ends well; "all" every one, while it
            trains; false none.
        finish_timeout_s: seconds that the end of a fit waits for W&B: for its own process to start
            too, if it writes only files.
    """

    stores_media = True

    config_key = "logger.wandb"
    taken_arguments: ClassVar = {
        "offline": lambda value: {"mode": "offline"} if value else {},
        **unset(
            "WandbLogger",
            anonymous="set WANDB_ANONYMOUS.",
            dir="give it as save_dir.",
            id="a run resumed from its checkpoint continues its W&B run.",
            version="a run resumed from its checkpoint continues its W&B run.",
        ),
    }

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | None = None,
        *,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        log_model: bool | Literal["all"] = False,
        finish_timeout_s: PositiveFloat = 60.0,
    ) -> None:
        self.save_dir = save_dir
        # as in Lightning, the attribute is the project's name
        self.project = self.name = project or os.environ.get("WANDB_PROJECT") or "trainkit"
        self.entity = entity
        self.group = group
        self.tags = tags
        self.mode = mode
        self.log_model = log_model
        self.finish_timeout_s = finish_timeout_s
        self._id: str | None = None
        self._run: Any = None
        self._rows = _Rows()
        self._watched: list[tuple[nn.Module, dict[str, Any]]] = []  # before a fit
        self._is_watching = False

    def watch(
        self,
        model: nn.Module,
        log: str | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Have W&B log histograms of a model's weights or gradients, from now on until the fit ends,
        or, before a fit, in each one once it opens.

        Args:
            model: whose layers are watched.
            log: "gradients", "parameters", "all" or None.
            log_freq: batches from one histogram to the next.
            log_graph: log the layers too.

        Raises:
            ConfigError: the weights are split over the ranks.
        """
        _refuse_split(model)
        options = {"log": log, "log_freq": log_freq, "log_graph": log_graph}
        if self._background is not None:
            self.hand_over("watching", functools.partial(self._watch, model, options))
        elif not self._is_elsewhere:
            self._watched.append((model, options))

    def _watch(self, model: nn.Module, options: dict[str, Any]) -> None:
        self._is_watching = True
        self._run.watch(model, **options)

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        self.save_dir = str(given_to(self).get("save_dir") or trainer.run_dir)
        if stage == "fit":
            self._id = None

    def state_dict(self) -> dict[str, Any]:
        """Return W&B's id of the run, so that a resumed run continues it."""
        return {"id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._id = state_dict["id"]

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Choose the id before the run is opened: a checkpoint may come first."""
        if self._id is None or not trainer.checkpoints.resumed_in_place:
            # a sweep's agent has chosen it already
            self._id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        for model, _ in self._watched:
            _refuse_split(model)
        super().on_fit_start(trainer, task)

    def require(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"WandbLogger needs wandb ({error}). Run: pip install 'trainkit[wandb]'"
            ) from error
        self._wandb: Any = wandb

    @property
    def asks_a_server(self) -> bool:
        """See Logger: not if W&B writes only files."""
        return (self.mode or os.environ.get("WANDB_MODE", "online")) == "online"

    def open(self, run: RunFacts) -> None:
        """Start a W&B run, or continue that of the run's own checkpoint."""
        given: dict[str, Any] = given_to(self)
        folder = Path(given.get("save_dir") or run.run_dir)
        # in place of one that is not there W&B takes a temporary one
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            id=self._id,
            resume="allow" if run.resumes else None,
            project=self.project,
            name=run.without_secrets(
                given.get("name") or os.environ.get("WANDB_NAME") or run.run_dir.name
            ),
            entity=self.entity,
            group=run.without_secrets(self.group),
            tags=run.without_secrets(self.tags),
            mode=self.mode,
            dir=str(folder),
            config=run.hyperparams,
        )
        self._run.define_metric(_AXIS)
        self._run.define_metric("*", step_metric=_AXIS, step_sync=True)
        self._rows = _Rows()
        if run.resumes and not run.follows:
            logged: dict[str, Any] = dict(self._run.summary)
            self._rows.logged_until = int(logged.get("step", logged.get(_AXIS, -1)))
        for model, options in [] if run.follows else self._watched:
            self._watch(model, options)

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        """Add those of `log_hyperparams`; the run's own are there since `open`."""
        if self.given_hparams:
            self._run.config.update(params, allow_val_change=True)

    def on_metrics(
        self, trainer: RunView, task: Task, metrics: dict[str, float], step: int
    ) -> None:
        """Pass the run's step on too: `step` may be an axis of the user's own."""
        super().on_metrics(trainer, task, {**metrics, "step": trainer.global_step}, step)

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Pass the values to W&B's own process."""
        at = int(metrics.get("step", step))
        values = {**metrics, "epoch": epoch, "step": at, "_timestamp": self.logged_at}
        self._rows.log(self._run, values, step, at)

    def native(self) -> Any:
        return self._run

    def log_media(self, media: Media, step: int) -> None:
        made: Any
        if media.kind == "image":
            made = self._wandb.Image(media.value, caption=media.caption or None)
        elif media.kind == "audio":
            made = self._wandb.Audio(media.value, sample_rate=media.sample_rate)
        elif media.kind == "histogram":
            made = self._wandb.Histogram(media.value[np.isfinite(media.value)])
        else:
            columns, rows = (
                (["text"], [[media.value]])
                if media.kind == "text"
                else (media.columns, media.value)
            )
            made = self._wandb.Table(columns=columns, data=rows)
        self._rows.log(self._run, {media.name: made}, step, step)

    @property
    def version(self) -> str | None:
        """W&B's id of the run; None before the first fit."""
        return self._id

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Record that the run uses this artifact, and return it. From a hook."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str:
        """Download an artifact, and return its folder. If a run of W&B is open, and with
        `use_artifact`, it records that it uses it. Call it on one rank.
        """
        import wandb

        if wandb.run is not None and use_artifact:
            stored: Any = wandb.run.use_artifact(artifact)
        else:
            stored = wandb.Api().artifact(artifact, type=artifact_type)
        return str(stored.download(root=None if save_dir is None else os.fspath(save_dir)))

    def upload(self, folder: Path, name: str, aliases: tuple[str, ...]) -> None:
        """W&B copies the folder first, and uploads in its own process."""
        artifact = self._wandb.Artifact(
            f"model-{self._id}", type="model", metadata={"checkpoint": name}
        )
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=list(aliases))

    def finalize(self, status: str) -> None:
        if self._run is not None:
            run = self._run
            self._run = None
            if self._is_watching:
                self._is_watching = False
                run.unwatch()  # its hooks fail without a run
            run.finish(exit_code=0 if status == "success" else 1)


def _refuse_split(model: nn.Module) -> None:
    if any(is_spread(parameter) for parameter in model.parameters()):
        raise ConfigError(
            "WandbLogger.watch: the weights are split over the ranks, and W&B would gather them on"
            " rank 0 alone, which hangs. Watch a model on engine=ddp, or log norms of gradients by"
            " callbacks=gradients."
        )
