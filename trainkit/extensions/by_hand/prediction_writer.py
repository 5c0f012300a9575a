"""BasePredictionWriter: lets a user write predictions in a form of their own,
while `predict` runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.errors import TaskError


class WriteInterval(str):
    """When a BasePredictionWriter writes, with the properties that Lightning's has."""

    on_batch = property(lambda self: self != "epoch")
    on_epoch = property(lambda self: self != "batch")


@checked
class BasePredictionWriter(Callback):
    """Subclass it and define `write_on_batch_end`, `write_on_epoch_end` or both; each rank writes
    its own batches.

    For tensors in files, `Trainer.predict(write_to=...)` needs no callback. Pass
    `return_predictions=False` to `predict` if its result is not needed: nothing is then gathered
    over ranks.

    Args:
        write_interval: "batch": after each batch; "epoch": once at the end, with all outputs of
            this rank, which stay in memory (and on the device) until then; "batch_and_epoch": both.

    Raises:
        TaskError: the method of the interval is not defined.
    """

    def __init__(
        self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch"
    ) -> None:
        self.interval = self.write_interval = WriteInterval(write_interval)
        self._outputs: list[Any] = []
        self._indices: list[Sequence[int] | None] = []

    def write_on_batch_end(
        self,
        trainer: RunView,
        task: Task,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the outputs of one batch.

        Args:
            prediction: the result of `predict_step`.
            batch_indices: the samples' places in the data set; None for a stream.
            batch_idx: the batch's number on this rank.
        """
        raise TaskError(self._missing("write_on_batch_end"))

    def write_on_epoch_end(
        self,
        trainer: RunView,
        task: Task,
        predictions: Sequence[Any],
        batch_indices: Sequence[Sequence[Sequence[int] | None]],
    ) -> None:
        """Write the outputs of all batches of this rank.

        Args:
            predictions: of each batch.
            batch_indices: as in Lightning a list for each loader, and there is one: the places of
                each batch's samples (see `write_on_batch_end`).
        """
        raise TaskError(self._missing("write_on_epoch_end"))

    def on_predict_start(self, trainer: RunView, task: Task) -> None:
        """Forget an earlier prediction."""
        self._outputs = []
        self._indices = []

    def on_predict_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the batch, or keep it for the end."""
        indices = trainer.evaluator.sample_indices()
        if not trainer.engine.ranks.counts_samples:
            return
        if self.interval.on_batch:
            self.write_on_batch_end(
                trainer, task, outputs, indices, batch, batch_idx, dataloader_idx
            )
        if self.interval.on_epoch:
            self._outputs.append(outputs)
            self._indices.append(indices)

    def on_predict_end(self, trainer: RunView, task: Task) -> None:
        """Write all batches."""
        if self.interval.on_epoch and trainer.engine.ranks.counts_samples:
            self.write_on_epoch_end(trainer, task, self._outputs, [self._indices])
            self._outputs = []
            self._indices = []

    def _missing(self, method: str) -> str:
        own = type(self).__name__
        return (
            f"{own} has no {method}(), and write_interval is '{self.interval}'. Define it, or"
            " choose another interval."
        )
