"""TensorBoard: scalars and the run's settings; on request histograms and the model's graph."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.arguments import PositiveInt, checked
from trainkit.device.sync_guard import allowed_read
from trainkit.loggers.base import Logger, RunFacts
from trainkit.loggers.graph import Forward, left_as_found, why_not
from trainkit.loggers.rows import flatten

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


@checked
class TensorBoardLogger(Logger):
    """Writes `<run_dir>/tensorboard/`; look at it with `tensorboard --logdir runs`.

    The HPARAMS tab compares the runs below `--logdir`: their settings, and the last value of each scalar.

    Args:
        histograms_every_n_steps: steps between two histograms of all weights and gradients (those of the whole step, after
            the update), or None for none. Such a step waits for the device, and copies both to the host.
        log_graph: draw the model's graph from the first training batch. `forward` is run once more for it on rank 0 alone, in
            evaluation mode and without gradients; it must not call other ranks.
        hparams: write the settings for the HPARAMS tab.
    """

    config_key = "logger.tensorboard"
    settles = True

    def __init__(
        self, histograms_every_n_steps: PositiveInt | None = None, log_graph: bool = False, hparams: bool = True
    ) -> None:
        self.histograms_every_n_steps, self.log_graph, self.hparams = histograms_every_n_steps, log_graph, hparams
        self._writer: Any = None  # a SummaryWriter, which has no types
        self._ended: Any = None  # what says to the HPARAMS tab that the run has ended well

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Begin; a run that goes on has its graph."""
        self._graph_due = self.log_graph and not trainer.session.goes_on_in_place
        self._names = {id(parameter): name for name, parameter in task.named_parameters()}
        super().on_fit_start(trainer, task)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """Draw the graph, once, where that is asked for."""
        if not self._graph_due or self._background is None:
            return
        self._graph_due = False
        if not self.settle() or self._writer is None:
            return  # the disk does not answer, or has failed
        try:
            with allowed_read(), left_as_found(task):
                example = Forward.example(batch)
                traced = torch.jit.trace(Forward(task), example)  # type: ignore[no-untyped-call]
                self._writer.add_graph(traced, example)  # given a model, it would print what goes wrong
        except Exception as error:  # whatever a tracer makes of a model: it is the picture alone that is missing
            trainer.session.tell(f"TensorBoardLogger: no graph of {type(task).__name__}: {why_not(error)}. Training goes on.")

    def on_before_zero_grad(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
        """Take histograms of what this optimizer owns, where they are due."""
        every = self.histograms_every_n_steps
        if every is None or self._background is None or (trainer.global_step + 1) % every:
            return
        taken: dict[str, Tensor] = {}
        with allowed_read():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                name = self._names.get(id(parameter), "unnamed").replace(".", "/")
                taken[f"weights/{name}"] = _on_host(parameter)
                if parameter.grad is not None:
                    taken[f"gradients/{name}"] = _on_host(parameter.grad)
        work = functools.partial(self._write_histograms, taken, trainer.global_step + 1)
        self.hand_over(f"writing the histograms of step {trainer.global_step + 1}", work)
        self.settle()  # copies of all weights do not pile up

    def require(self) -> None:
        """See Logger. It is not at the top since it takes a while, which a run without this logger need not wait for."""
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        self._make_writer: Any = SummaryWriter
        self._hparam_summaries: Any = hparams

    def open(self, run: RunFacts) -> None:
        """Open the writer; a run that goes on hides what it trains anew."""
        hides = run.global_step + 1 if run.global_step else None
        self._writer = self._make_writer(str(run.run_dir / "tensorboard"), purge_step=hides)

    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Write scalars, as of when they were logged."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=self.logged_at)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the settings: as a text, and for the HPARAMS tab."""
        text = json.dumps(params, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```")
        if self.hparams:
            # Into the run's own events: SummaryWriter.add_hparams would make a run below it. Of an "experiment", which lists
            # settings and metrics, TensorBoard takes the first it finds for all runs; without one it looks at each.
            words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in flatten(params).items()}
            _, begun, self._ended = self._hparam_summaries(words, {})
            self._writer.file_writer.add_summary(begun)

    def flush(self) -> None:
        """Put on disk what was written."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Flush and close. TensorBoard keeps a run's first end alone: one that may be gone on with has none yet."""
        if self._writer is None:
            return
        if self._ended is not None and status == "success":
            self._writer.file_writer.add_summary(self._ended)
        self._writer.close()
        self._writer = None

    def _write_histograms(self, taken: dict[str, Tensor], step: int) -> None:
        for name, values in taken.items():
            finite = values[torch.isfinite(values)]
            if finite.numel():
                self._writer.add_histogram(name, finite, step)
            if finite.numel() < values.numel():
                count = values.numel() - finite.numel()
                self._writer.add_scalar(f"nonfinite/{name}", count, step)


def _on_host(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values()  # of a sparse gradient, what is there
    return values.to("cpu", torch.float32, copy=True).flatten()
