"""TensorBoard: scalars, and the run's settings as text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard.writer import SummaryWriter

from trainkit.loggers.base import Logger

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


class TensorBoardLogger(Logger):
    """Writes `<run_dir>/tensorboard/`; look at it with `tensorboard --logdir runs`."""

    def open(self, trainer: Trainer) -> None:
        """Open the writer; a run that goes on hides what it trains anew."""
        self._writer = SummaryWriter(
            str(trainer.run_dir / "tensorboard"), purge_step=trainer.global_step + 1 if trainer.global_step else None
        )

    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Queue scalars; a thread of the writer puts them on disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the settings as a text."""
        text = json.dumps(params, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```")

    def finalize(self, status: str) -> None:
        """Flush and close."""
        self._writer.close()
