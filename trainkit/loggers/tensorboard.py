"""TensorBoardLogger: scalars and the run's settings;
optionally histograms and the model's graph.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainkit.api.lightning_arguments import nothing, unset
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveInt, checked
from trainkit.device.sync_guard import allowed_read
from trainkit.loggers.base import Logger, RunFacts
from trainkit.loggers.graph import Forward, left_as_found, why_not
from trainkit.loggers.place import LoggerPlace, Placed
from trainkit.loggers.rows import flatten
from trainkit.metrics.media import Media


@checked
class TensorBoardLogger(Placed, Logger):
    """Writes `<run_dir>/tensorboard/`; view it with `tensorboard --logdir runs`.

    The HPARAMS tab compares the runs under `--logdir`: their settings, and the last value of each
    scalar.

    Args:
        save_dir: a folder in place of the run's own; the files are then in
            `<save_dir>/<name>/<version>`.
        name: a folder below it.
        version: the run's folder below that. Default: the name of the run's own folder.
        histograms_every_n_steps: steps between two histograms of all weights and gradients (those
            of the whole step, after the update); None for no histograms. Such a step waits for the
            device, and copies both to the host.
        log_graph: draw the model's graph from the first training batch. This runs `forward` once
            more, on rank 0 only, in evaluation mode and without gradients; `forward` must not run
            collectives.
        hparams: write the settings for the HPARAMS tab.
    """

    config_key = "logger.tensorboard"
    settles = True
    stores_media = True
    own_folder = "tensorboard"
    taken_arguments: ClassVar = {
        **unset("TensorBoardLogger", sub_dir="give it as part of name."),
        "default_hp_metric": nothing,  # the tab has the last value of each scalar
    }

    def __init__(
        self,
        save_dir: str | None = None,
        name: str | None = None,
        version: int | str | None = None,
        *,
        histograms_every_n_steps: PositiveInt | None = None,
        log_graph: bool = False,
        hparams: bool = True,
    ) -> None:
        self.place = LoggerPlace(save_dir, name, version)
        self.histograms_every_n_steps = histograms_every_n_steps
        if histograms_every_n_steps is not None:
            self.needs_of_engine = frozenset({"layers"})
        self.log_graph = log_graph
        self.hparams = hparams
        self._writer: Any = None  # a SummaryWriter, which has no types
        self._ended: Any = None  # the record by which the HPARAMS tab knows that the run ended well

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Reset; a resumed run already has its graph."""
        self._graph_due = self.log_graph and not trainer.checkpoints.resumed_in_place
        self._names = {id(parameter): name for name, parameter in task.named_parameters()}
        super().on_fit_start(trainer, task)

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Draw the graph once, if requested."""
        if not self._graph_due or self._background is None:
            return
        self._graph_due = False
        if not self.settle() or self._writer is None:
            return  # the disk is too slow, or has failed
        try:
            with allowed_read(), left_as_found(task):
                example = Forward.example(batch)
                traced = torch.jit.trace(Forward(task), example)  # type: ignore[no-untyped-call]
                # given a model, add_graph would print errors itself
                self._writer.add_graph(traced, example)
        except Exception as error:  # a tracer may raise anything; only the drawing is missing
            trainer.say(
                f"TensorBoardLogger: no graph of {type(task).__name__}: {why_not(error)}. Training"
                " continues."
            )

    def on_after_optimizer_step(self, trainer: RunView, task: Task) -> None:
        """Take histograms of the optimizers' parameters when due."""
        every = self.histograms_every_n_steps
        if every is None or self._background is None or (trainer.global_step + 1) % every:
            return
        taken: dict[str, Tensor] = {}
        with allowed_read():
            groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
            for parameter in (parameter for group in groups for parameter in group["params"]):
                name = self._names.get(id(parameter), "unnamed").replace(".", "/")
                taken[f"weights/{name}"] = _on_host(parameter)
                if parameter.grad is not None:
                    taken[f"gradients/{name}"] = _on_host(parameter.grad)
        work = functools.partial(self._write_histograms, taken, trainer.global_step + 1)
        self.hand_over(f"writing the histograms of step {trainer.global_step + 1}", work)
        self.settle()  # limits the number of pending copies of all weights

    def require(self) -> None:
        """Imported here because the import takes a while,
        which a run without this logger need not pay.
        """
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        self._make_writer: Any = SummaryWriter
        self._hparam_summaries: Any = hparams
        self._events_of: Any = EventFileLoader

    def open(self, run: RunFacts) -> None:
        """Open the writer; a resumed run hides the steps that it repeats,
        and writes nothing twice of the one it begins at.
        """
        folder = self.place.make(run.run_dir, self.own_folder)
        repeats = run.global_step > 0 and not run.follows
        self._resumed_at, self._there = run.global_step, set[str]()
        if run.global_step:
            _wait_for_a_later_name(folder)
        if repeats:
            self._there = self._names_at(folder, run.global_step)
        hides = run.global_step + 1 if repeats else None
        self._writer = self._make_writer(str(folder), purge_step=hides)

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Write scalars, with the time at which they were logged."""
        for name, value in metrics.items():
            if step != self._resumed_at or name not in self._there:
                self._writer.add_scalar(name, value, step, walltime=self.logged_at)

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the settings: as a text, and for the HPARAMS tab."""
        text = json.dumps(params, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```")
        if self.hparams:
            # Into the run's own events: SummaryWriter.add_hparams would create a run below it.
            # TensorBoard uses the first "experiment" record, which lists settings and metrics, for
            # all runs; without one it reads each run's own.
            texts = {
                name: str(value).lower() if isinstance(value, bool) else value
                for name, value in flatten(params).items()
            }
            _, begun, self._ended = self._hparam_summaries(texts, {})
            self._writer.file_writer.add_summary(begun)

    def native(self) -> Any:
        return self._writer

    def log_media(self, media: Media, step: int) -> None:
        if media.kind == "image":
            self._writer.add_image(media.name, media.value, step, dataformats="HWC")
        elif media.kind == "audio":
            self._writer.add_audio(
                media.name, torch.from_numpy(media.value), step, sample_rate=media.sample_rate
            )
        elif media.kind == "histogram":
            self._write_histograms({media.name: torch.from_numpy(media.value)}, step)
        elif media.kind == "text":
            self._writer.add_text(media.name, media.value, step)
        else:
            lines = [media.columns, ["---"] * len(media.columns), *media.value]
            self._writer.add_text(
                media.name, "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines), step
            )

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Flush and close. TensorBoard honours only the first end-of-run record,
        so write none for a run that may resume.
        """
        if self._writer is None:
            return
        if self._ended is not None and status == "success":
            self._writer.file_writer.add_summary(self._ended)
        self._writer.close()
        self._writer = None

    def _names_at(self, folder: Path, step: int) -> set[str]:
        """Return the names that earlier starts of the run have written at a step,
        and no later start has hidden.
        """
        names: set[str] = set()
        for file in sorted(folder.glob("events.out.tfevents.*")):
            for event in self._events_of(str(file)).Load():
                if event.HasField("session_log") and event.step <= step:
                    names.clear()
                elif event.step == step:
                    names |= {value.tag for value in event.summary.value}
        return names

    def _write_histograms(self, taken: dict[str, Tensor], step: int) -> None:
        for name, values in taken.items():
            finite = values[torch.isfinite(values)]
            if finite.numel():
                self._writer.add_histogram(name, finite, step)
            if finite.numel() < values.numel():
                count = values.numel() - finite.numel()
                self._writer.add_scalar(f"nonfinite/{name}", count, step)


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, at most a second, until a new file's name follows those that are there.

    TensorBoard reads a folder's files in the order of their names: the second of their creation,
    host, process, and a counter whose 10 precedes its 9.
    """
    newest = max(
        (int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")), default=0
    )
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))


def _on_host(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values()  # the stored values of a sparse gradient
    return values.to("cpu", torch.float32, copy=True).flatten()
