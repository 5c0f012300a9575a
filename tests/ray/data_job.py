"""A fit on Ray Data that records each sample:
python -m tests.ray.data_job RUN_DIR JOURNAL [KILL_AT].
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.toy import Line, rows
from trainkit import Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.data import RayData

NUM_SAMPLES = 61


class Numbered(Line):
    """A Line that records the samples of each step, by rank."""

    def __init__(self, journal: Path, kill_at: int | None) -> None:
        super().__init__()
        self.journal, self.kill_at = journal, kill_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Record, then train; rank 0 is killed before the step `kill_at`."""
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y, number = batch
        rank = self.trainer.global_rank
        with self.journal.open("a") as file:
            print(
                json.dumps([self.current_epoch, self.global_step, rank, number.tolist()]), file=file
            )
        return super().training_step((x, y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count the samples too."""
        super().validation_step(batch[:2], batch_idx)
        self.log("val/number", batch[2].double().mean())


def table(num_samples: int) -> Any:
    """Return the rows of tests.helpers.toy as a Ray Dataset, with their numbers."""
    import ray.data

    data = rows(num_samples)
    made = [{"x": np.asarray(x), "y": np.asarray(y), "number": i} for i, (x, y) in enumerate(data)]
    return ray.data.from_items(made, override_num_blocks=5)


def main() -> None:
    """Train two epochs."""
    run_dir, journals = map(Path, sys.argv[1:3])
    kill_at = int(sys.argv[3]) if len(sys.argv) > 3 else None
    columns = ["x", "y", "number"]
    trainer = Trainer(
        max_epochs=2,
        run_dir=str(run_dir),
        seed=3,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)],
    )
    journals.mkdir(parents=True, exist_ok=True)
    journal = journals / f"{os.getpid()}.txt"
    train = RayData(lambda: table(NUM_SAMPLES), 6, columns, shuffle=True)
    val = RayData(lambda: table(17), 6, columns)
    trainer.fit(Numbered(journal, kill_at), train, val, ckpt_path="auto")
    if trainer.is_global_zero:
        weights = [
            float(value) for p in trainer.run.task.parameters() for value in p.detach().reshape(-1)
        ]
        print(
            "RESULT",
            json.dumps({"weights": weights, "val": trainer.callback_metrics["val/number"]}),
        )


if __name__ == "__main__":
    main()
