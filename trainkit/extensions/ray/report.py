"""RayReport and TuneReport: a run's metrics and checkpoints for Ray Train and Ray Tune.

A report follows each validation, or each epoch of a run without validation. It holds a checkpoint
of that moment, written for it in `<run_dir>/reported`, which Ray copies to its storage:
ModelCheckpoint's own need not be due.

TuneReport in a job of `trainkit.tuning.trial` sends its reports to the trial's process
(tuning/link.py), which knows Ray.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, checked, not_logged
from trainkit.errors import ConfigError
from trainkit.extensions.ray.connection import folder_of, load_ray
from trainkit.extensions.ray.tuning.link import TrialLink, connect

_FOLDER = "reported"


class Report(Callback):
    """What both callbacks share: when a report is due, and its checkpoint."""

    # a checkpoint includes the effects of the other callbacks' and the Task's hooks
    runs_last = True

    def __init__(self, checkpoints: bool) -> None:
        self.checkpoints = checkpoints
        self._validations_seen = 0

    @abstractmethod
    def _send(self, trainer: RunView, metrics: dict[str, Any], folder: Path | None) -> None:
        """Send a report; called on all ranks. `folder` is the checkpoint's, on rank 0."""

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Count validations from here on."""
        self._validations_seen = trainer.evaluator.num_validations

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if trainer.evaluator.num_validations != self._validations_seen:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        if (
            not trainer.evaluator.has_data
            or trainer.evaluator.num_validations != self._validations_seen
        ):
            self._report(trainer)

    def _report(self, trainer: RunView) -> None:
        """Report the latest values. Call it on all ranks."""
        self._validations_seen = trainer.evaluator.num_validations
        place = trainer.run_dir / _FOLDER / f"step={trainer.global_step}"
        folder = None
        if self.checkpoints:
            trainer.save_checkpoint(place)
            folder = place if trainer.is_global_zero else None
        epoch = trainer.current_epoch
        state = trainer.state
        ended = state.epoch_done or state.step_in_epoch == trainer.train_feed.num_steps_in(epoch)
        # epochs that are done
        metrics = {**trainer.callback_metrics, "epoch": epoch + ended, "step": trainer.global_step}
        try:
            self._send(trainer, metrics, folder)
        finally:
            if trainer.is_global_zero:
                shutil.rmtree(place.parent, ignore_errors=True)


@checked
class RayReport(Report):
    """Reports to `ray.train`, in the function of a TorchTrainer; and hears that a node is about to
    be taken away.

    A preemption notice (`ray.train.get_preemption_info()`) ends the run as a signal does: all ranks
    report a checkpoint after the same step, and `fit` raises trainkit.Preempted. Ray Train then
    starts the function again on other nodes, if its FailureConfig has a failure left
    (max_failures); `trainer.fit(..., ckpt_path=RayReport.checkpoint())` resumes there.

    Args:
        checkpoints: report a checkpoint each time. Without one Ray Train keeps no metrics either.
        preemption_interval_s: seconds between two looks for a notice.
    """

    def __init__(
        self, checkpoints: bool = True, preemption_interval_s: PositiveFloat = 5.0
    ) -> None:
        super().__init__(checkpoints)
        self.preemption_interval_s = preemption_interval_s
        self._next_look = 0.0

    @staticmethod
    def checkpoint() -> str | None:
        """Return the folder of the checkpoint to resume from, the latest that was reported;
        None at the first start.
        """
        reported = _ray("train", "RayReport").get_checkpoint()
        return None if reported is None else folder_of(reported)

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Refuse a process that Ray Train did not start."""
        if stage != "fit":
            return
        try:
            workers = _ray("train", "RayReport").get_context().get_world_size()
        except RuntimeError as error:
            raise ConfigError(
                "RayReport reports to Ray Train, and this process is no worker of it. Call fit in"
                " the function of a ray.train.torch.TorchTrainer, or leave the callback out."
            ) from error
        if workers != trainer.world_size:
            raise ConfigError(
                f"RayReport: Ray Train started {workers} workers, and the run has"
                f" {trainer.world_size} ranks. Use engine=auto."
            )

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Count validations and time from here on."""
        super().on_train_start(trainer, task)
        self._next_look = trainer.coordinator.now + self.preemption_interval_s

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        super().on_train_step_end(trainer, task)
        # rank 0's clock: all ranks ask at the same step, as Ray requires
        if trainer.coordinator.now < self._next_look:
            return
        self._next_look = trainer.coordinator.now + self.preemption_interval_s
        notice = _ray("train", "RayReport").get_preemption_info()
        if notice is not None:
            self._report(trainer)
            nodes = ", ".join(sorted(node[:8] for node in notice.preempted_node_to_ranks))
            trainer.coordinator.preempt(f"Ray's notice that it takes away node {nodes}")

    def _send(self, trainer: RunView, metrics: dict[str, Any], folder: Path | None) -> None:
        train = _ray("train", "RayReport")
        train.report(
            metrics,
            checkpoint=None if folder is None else train.Checkpoint.from_directory(str(folder)),
        )


@checked
class TuneReport(Report):
    """Reports to Ray Tune: in a function of your own in `tune.Tuner`, or in a job of
    `trainkit.tuning.trial`, which adds it.

    The scheduler's decision to end a trial ends the run here.

    Args:
        checkpoints: report a checkpoint each time: PBT and searches that resume need it.
        metric: the value that the search compares; a run that does not log it ends with an error.
    """

    def __init__(self, checkpoints: bool = True, metric: str | None = None) -> None:
        super().__init__(checkpoints)
        self.metric = metric
        self._link: TrialLink | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Connect to the trial's process, if it is another one."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        self._link = connect()
        if self._link is None and not _in_tune():
            raise ConfigError(
                "TuneReport reports to Ray Tune, and this process is no trial of it. Start the run"
                " by ray.tune.Tuner, trainkit.tuning.trial or `python -m trainkit tune`, or leave"
                " the callback out."
            )

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _report(self, trainer: RunView) -> None:
        if self.metric is not None and self.metric not in trainer.callback_metrics:
            if trainer.evaluator.is_awaited:
                return
            raise ConfigError(
                f"search.metric is {not_logged(self.metric, trainer.callback_metrics)}"
            )
        super()._report(trainer)

    def _send(self, trainer: RunView, metrics: dict[str, Any], folder: Path | None) -> None:
        continues = True
        if self._link is not None:
            continues = self._link.report(metrics, None if folder is None else str(folder))
        elif trainer.is_global_zero:
            tune = _ray("tune", "TuneReport")
            tune.report(
                metrics,
                checkpoint=None if folder is None else tune.Checkpoint.from_directory(str(folder)),
            )
        if not trainer.engine.comm.broadcast_object(continues):
            trainer.request_stop("the search ended this trial", at_once=True)


def _in_tune() -> bool:
    try:
        return _ray("tune", "TuneReport").get_context().get_trial_id() is not None
    except RuntimeError:
        return False


def _ray(part: str, callback: str) -> Any:
    """Return ray.train or ray.tune; they are imported when a run uses them."""
    return load_ray(f"ray.{part}", callback)
