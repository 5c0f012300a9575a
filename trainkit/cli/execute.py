"""One job, with torch: builds the objects, runs the command, prints the results."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.config.compose import ComposedJob
from trainkit.config.instantiate import build
from trainkit.console import console_of, short
from trainkit.errors import ConfigError, Dismissed, summary
from trainkit.launch.environment import read_launcher
from trainkit.run.folder import CONFIG
from trainkit.run.lock import LOCK
from trainkit.run.state import STATE, write_state
from trainkit.safety.masking import scrubbed


class RunFiles(Callback):
    """Writes the resolved config, Hydra's files and the run's state into the run's folder, on rank
    0.

    Those of an earlier run in the folder stay until the fit has its weights: a resume that is
    refused changes nothing. As a context manager it writes how training ended; of an illegal
    request in a new folder nothing is left.
    """

    may_differ = True  # the settings are compared one by one

    def __init__(self, job: ComposedJob) -> None:
        self._job = job
        self._masked_values = job.recorded.values if job.recorded else ()
        self._run_dir: Path | None = None  # once it is written to
        folder = Path(job.config["run_dir"]).absolute()
        # that the fit will make, the innermost first; forgotten once it begins
        self._new = [each for each in (folder, *folder.parents) if not each.exists()]

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._new and isinstance(error, ConfigError):
            self._remove()
        # the job continues without this worker
        elif self._run_dir is not None and not isinstance(error, Dismissed):
            state = (
                "done" if error is None else "failed" if isinstance(error, Exception) else "stopped"
            )
            # a full disk does not hide the error that ended the run
            with contextlib.suppress(OSError):
                text = scrubbed(summary(error), self._masked_values)
                write_state(self._run_dir, state, text if state == "failed" else "")

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and not (trainer.run_dir / CONFIG).exists():
            self._write(trainer.run_dir)

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        self._new.clear()
        if trainer.is_global_zero:
            self._write(trainer.run_dir)

    def _remove(self) -> None:
        if self._run_dir is None:
            return
        for name in (*self._job.files, STATE, LOCK):
            (self._run_dir / name).unlink(missing_ok=True)
        for folder in (self._run_dir / ".hydra", *self._new):
            with contextlib.suppress(OSError):  # it holds more
                folder.rmdir()

    def _write(self, run_dir: Path) -> None:
        for name, text in self._job.files.items():
            path = run_dir / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        self._run_dir = run_dir
        write_state(run_dir, "running")


def execute(job: ComposedJob) -> dict[str, float]:
    """Run one job; return the latest logged values."""
    files = RunFiles(job)
    built = build(job.config, [files], job.recorded)
    trainer = built.trainer
    task = built.task
    if job.notes and read_launcher().is_main:
        lines = [
            f"config of {job.config['run_dir']}, with changes:",
            *(f"  {note}" for note in job.notes),
        ]
        print("\n".join(lines), flush=True)
    ckpt_path = job.config.get("ckpt_path")
    if job.command == "fit":
        if job.config.get("resume"):
            ckpt_path = f"auto:{ckpt_path}" if ckpt_path else "auto"
        weights = {
            "init_weights": job.config.get("init_weights"),
            "strict": job.config.get("strict", True),
        }
        with files:
            trainer.fit(task, datamodule=built.datamodule, ckpt_path=ckpt_path, **weights)
        if trainer.is_global_zero:
            _show_files(trainer.run_dir)
    elif job.command == "predict":
        given: dict[str, Any] = {"ckpt_path": ckpt_path, "table": job.config.get("table") or "csv"}
        trainer.predict(
            task, datamodule=built.datamodule, return_predictions=False, write_to=True, **given
        )
        if trainer.is_global_zero:
            folder = trainer.run_dir / "predictions"
            text = f"{len(list(folder.glob('*.pt')))} batches of predictions are in {short(folder)}"
            console_of().print(
                f"{text}; trainkit.read_predictions(folder) reads them in order", soft_wrap=True
            )
            for table in folder.glob("predictions.*"):
                console_of().print(f"table  {short(table)}", soft_wrap=True)
    else:
        run = trainer.validate if job.command == "validate" else trainer.test
        run(task, datamodule=built.datamodule, ckpt_path=ckpt_path)
    return dict(trainer.callback_metrics)  # none on a rank that takes no part


def _show_files(run_dir: Path) -> None:
    console = console_of()
    best = run_dir / "checkpoints" / "best"
    if best.exists():
        console.print(f"best checkpoint  {short(best.resolve())}", soft_wrap=True)
    for metrics in ("metrics.csv", "metrics.jsonl"):
        if (run_dir / metrics).exists():
            console.print(f"metrics          {short(run_dir / metrics)}", soft_wrap=True)
    if (run_dir / "tensorboard").exists():
        console.print(f"curves           tensorboard --logdir {short(run_dir)}", soft_wrap=True)
