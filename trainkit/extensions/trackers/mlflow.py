"""MLFlowLogger: logs to a tracking server, or to a folder of the run. The only home of mlflow."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainkit.api.lightning_arguments import unset
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, checked
from trainkit.errors import ConfigError
from trainkit.extensions.trackers.checkpoints import CheckpointLogger
from trainkit.loggers.base import RunFacts
from trainkit.loggers.media_files import write_media
from trainkit.loggers.rows import flatten
from trainkit.metrics.media import Media

_KEY_TAG = "trainkit.run"
_STATUS = {"success": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
_STRANGE = re.compile(r"[^\w\-. :/]", re.ASCII)  # characters that MLflow refuses in a name
_LONGEST_NAME = 250  # accepted by every MLflow store
_BATCH, _PARAMS_BATCH = 500, 100  # MLflow takes 1000 metrics and 100 params at once


@checked
class MLFlowLogger(CheckpointLogger):
    """Logs to MLflow. Needs the extra: `pip install 'trainkit[mlflow]'`.

    Settings become params, under dotted names; values become metrics, sent in batches if the server
    is slow; the run ends as FINISHED, FAILED or (by a signal) KILLED. A run resumed from its own
    checkpoint continues the same MLflow run: a setting that has changed becomes the tag
    `changed.<name>`, because MLflow's params are immutable.

    Args:
        experiment_name: name of the experiment; created if it does not exist.
        run_name: name of the run; default: that of the run folder.
        tracking_uri: address of the server, or "file:FOLDER". Default: MLFLOW_TRACKING_URI if set,
            else the folder `<run_dir>/mlruns` (browse it with `MLFLOW_ALLOW_FILE_STORE=true mlflow
            ui --backend-store-uri FOLDER`).
        tags: name -> text.
        log_model: upload checkpoints as artifacts under `checkpoints/`: true those that are there
            if the fit ends well; "all" every one, while it trains; false none.
        finish_timeout_s: seconds that the end of a fit waits for the server.
    """

    stores_media = True

    config_key = "logger.mlflow"
    taken_arguments: ClassVar = unset(
        "MLFlowLogger",
        artifact_location=(
            "create the experiment with it: `mlflow experiments create --artifact-location`."
        ),
        run_id="a run resumed from its checkpoint continues its MLflow run.",
        save_dir="give the folder as tracking_uri='file:FOLDER'.",
    )

    def __init__(
        self,
        experiment_name: str = "trainkit",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        log_model: bool | Literal["all"] = False,
        finish_timeout_s: PositiveFloat = 60.0,
    ) -> None:
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self.tags = tags or {}
        self.log_model = log_model
        self.finish_timeout_s = finish_timeout_s
        self._key: str | None = None
        self._run_id: str | None = None
        self._experiment_id: str | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        if stage == "fit":
            self._key = self._run_id = None

    @property
    def run_id(self) -> str | None:
        """The server's id of the run, once it has answered, which this waits for;
        None before a fit and on other ranks.
        """
        self.settle()
        return self._run_id

    version = run_id

    @property
    def name(self) -> str | None:
        """The server's id of the experiment, as in Lightning; see `run_id`."""
        self.settle()
        return self._experiment_id

    @property
    def save_dir(self) -> str | None:
        """The folder of a tracking_uri="file:FOLDER"; None for a server."""
        uri = self.tracking_uri or ""
        return uri.removeprefix("file:") if uri.startswith("file:") else None

    def state_dict(self) -> dict[str, Any]:
        """Return the tag by which a resumed run finds its MLflow run;
        the server's id may not be known at a checkpoint.
        """
        return {"key": self._key}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._key = state_dict["key"]

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Choose the tag before the server assigns an id."""
        if self._key is None or not trainer.checkpoints.resumed_in_place:
            self._key = secrets.token_hex(8)
        super().on_fit_start(trainer, task)

    def require(self) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError(
                f"MLFlowLogger needs mlflow ({error}). Run: pip install 'trainkit[mlflow]'"
            ) from error
        self._mlflow: Any = mlflow

    def open(self, run: RunFacts) -> None:
        """Start an MLflow run, or continue that of the run's own checkpoint."""
        uri = self.tracking_uri
        if uri is None and not self._mlflow.is_tracking_uri_set():
            uri = (run.run_dir / "mlruns").as_uri()
        if uri is not None and uri.startswith("file:"):
            # MLflow 3 requires it; its other stores need a server
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        self._waiting: list[Any] = []
        known = self._client.get_experiment_by_name(self.experiment_name)
        experiment = (
            self._client.create_experiment(self.experiment_name)
            if known is None
            else known.experiment_id
        )
        self._experiment_id = experiment
        runs = (
            self._client.search_runs([experiment], f"tags.`{_KEY_TAG}` = '{self._key}'")
            if run.resumes
            else []
        )
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = run.without_secrets(self.tags) | {_KEY_TAG: self._key}
            name = run.without_secrets(self.run_name or run.run_dir.name)
            self._run_id = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        texts = {_legal(name): str(value) for name, value in flatten(params).items()}
        known = self._client.get_run(self._run_id).data.params
        entities = self._mlflow.entities
        new = [entities.Param(name, value) for name, value in texts.items() if name not in known]
        for first in range(0, len(new), _PARAMS_BATCH):
            self._client.log_batch(self._run_id, params=new[first : first + _PARAMS_BATCH])
        for name, value in texts.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, _legal(f"changed.{name}"), value)

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        now = int(self.logged_at * 1000)
        numbers = {_legal(name): float(value) for name, value in metrics.items()} | {
            "epoch": float(epoch)
        }
        self._waiting += [
            self._mlflow.entities.Metric(name, value, now, step) for name, value in numbers.items()
        ]
        if len(self._waiting) >= _BATCH:
            self.flush()

    def native(self) -> Any:
        return self._client

    def log_media(self, media: Media, step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._client.log_artifact(
                self._run_id, str(write_media(Path(folder), media, step)), "media"
            )

    def flush(self) -> None:
        while self._waiting:
            batch = self._waiting[:_BATCH]
            self._waiting = self._waiting[_BATCH:]
            self._client.log_batch(self._run_id, metrics=batch)

    def upload(self, folder: Path, name: str, aliases: tuple[str, ...]) -> None:
        """The tags `checkpoint.last` and `checkpoint.best` name the last and the best one."""
        self._client.log_artifacts(self._run_id, str(folder), f"checkpoints/{name}")
        for alias in aliases:
            self._client.set_tag(self._run_id, f"checkpoint.{alias}", name)

    def finalize(self, status: str) -> None:
        if self._run_id is not None:
            self.flush()
            self._client.set_terminated(self._run_id, _STATUS[status])


def _legal(name: str) -> str:
    """Return a name that MLflow accepts: characters it refuses become "_"."""
    parts = [part for part in _STRANGE.sub("_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME] or "_"
