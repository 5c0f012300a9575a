"""What a checkpoint costs the step that saves it: a model of 100 MB with its momentum, on one rank, one run.

    python tests/benchmarks/checkpoints.py [--saves 8] [--every 12] [--json FILE]

step            median of the steps while nothing is saved
copy            one copy in memory of what is saved (weights and momentum), into memory that is there already
saving step     median of the steps at whose end a checkpoint is taken
beside          median of the steps while one is being written (they share cores and memory with the writing)
in line         writing the same files in the training thread, as most trainers do
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.callback import Callback
from trainkit.checkpoint.format import Snapshot, write

WIDTH, LAYERS, BATCH = 2500, 4, 256


class Wide(trainkit.Task):
    """Four layers, 25 million parameters: 100 MB of weights and as much of momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss."""
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


class Clock(Callback):
    """Notes when steps begin, and whether a checkpoint is being written then."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.writing: list[bool] = []

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """Note it."""
        thread = trainer.session.writer._thread
        self.begins.append(time.perf_counter())
        self.writing.append(thread is not None and thread.is_alive())


def measure(saves: int, every: int) -> dict[str, float]:
    """Train, and return the figures in milliseconds."""
    clock, steps = Clock(), every * (saves + 1) + 1
    data = TensorDataset(torch.randn(BATCH * 4, WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        keeper = trainkit.ModelCheckpoint(every_n_train_steps=every, every_n_epochs=None)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = trainkit.Trainer(max_steps=steps, callbacks=[clock, keeper], run_dir=folder, **quiet)
        task = Wide()
        trainer.fit(task, DataLoader(data, BATCH))
        optimizer = trainer.session.run.optimizers[0]
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        return read(clock, every) | {"copy": copy_ms([*task.parameters(), *momentum]), "in line": in_line_ms(task, momentum)}


def read(clock: Clock, every: int) -> dict[str, float]:
    """Return the medians of the steps of each kind; the first save, which makes its memory, is left out."""
    lengths = [1000 * (b - a) for a, b in zip(clock.begins, clock.begins[1:], strict=False)]
    saving = {i for i in range(len(lengths)) if (i + 1) % every == 0}
    kinds: dict[str, list[float]] = {"step": [], "saving step": [], "beside": []}
    for i, length in enumerate(lengths[every:], every):
        kind = "saving step" if i in saving else "beside" if clock.writing[i] else "step"
        kinds[kind].append(length)
    return {kind: statistics.median(values) for kind, values in kinds.items() if values}


def copy_ms(tensors: list[torch.Tensor]) -> float:
    """Return how long one copy of all tensors takes, into memory that is there."""
    held = [tensor.detach().clone() for tensor in tensors]
    took = []
    for _ in range(9):
        begin = time.perf_counter()
        for to, tensor in zip(held, tensors, strict=True):
            to.copy_(tensor.detach())
        took.append(1000 * (time.perf_counter() - begin))
    return statistics.median(took)


def in_line_ms(task: nn.Module, momentum: list[torch.Tensor]) -> float:
    """Return how long the writing itself takes."""
    took = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            write(Path(folder), Snapshot(dict(task.state_dict()), {}, {"momentum": momentum}, {}))
            took.append(1000 * (time.perf_counter() - begin))
    return statistics.median(took)


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.saves, arguments.every)
    figures["saving step less the copy, over a step"] = (figures["saving step"] - figures["copy"]) / figures["step"]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table("", "ms", title="a checkpoint of 200 MB")
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}" if "over" in name else f"{value:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
