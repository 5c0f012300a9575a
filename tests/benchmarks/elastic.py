"""What a commit in memory costs a step, beside the commit of Horovod's own elastic state and a bare copy of the same bytes.

    python tests/benchmarks/elastic.py

Two ranks on one host, elastic; 25.6 million parameters with Adam's state: 307 MB. Commits alternate: a step with ours, a step
without one, a step with Horovod's. Medians of rank 0, in ms.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
STEPS, WARM = 48, 6


def rank() -> None:
    """Run on each rank."""
    import horovod.torch as hvd
    from torch.utils.data import DataLoader, TensorDataset

    import trainkit
    from trainkit.callback import Callback
    from trainkit.callbacks import Elastic

    class Wide(trainkit.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, 6300), nn.ReLU(), nn.Linear(6300, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layers(batch[0]).square().mean()
            self.log("train/loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    class Clock(Callback):
        runs_last = True

        def __init__(self) -> None:
            self.times: dict[str, list[float]] = {"trainkit": [], "none": [], "horovod": [], "copy": []}

        def on_train_start(self, trainer: Any, task: Any) -> None:
            self.stock = hvd.elastic.TorchState(model=task.layers, optimizer=trainer.session.run.optimizers[0], batch=0)
            tensors = [*task.parameters(), *(t for s in trainer.session.run.optimizers[0].state.values() for t in s.values())]
            self.held = [torch.empty_like(t) for t in tensors]

        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            kind = ("trainkit", "none", "horovod", "copy")[trainer.global_step % 4]
            trainer.engine.barrier()
            begun = time.perf_counter()
            if kind == "trainkit":
                trainer.session.commit()
            elif kind == "horovod":
                self.stock.commit()
            elif kind == "copy":
                optimizer = trainer.session.run.optimizers[0]
                tensors = [*task.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
                self.held = self.held if len(self.held) == len(tensors) else [torch.empty_like(t) for t in tensors]
                with torch.no_grad():
                    for held, tensor in zip(self.held, tensors, strict=True):
                        held.copy_(tensor)
            if trainer.global_step > WARM:
                self.times[kind].append(1000 * (time.perf_counter() - begun))

    torch.set_num_threads(1)
    task, clock = Wide(), Clock()
    trainer = trainkit.Trainer(
        max_steps=STEPS,
        callbacks=[Elastic(commit_every_n_steps=10**9), clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=os.environ["BENCH_DIR"],
    )
    trainer.fit(task, DataLoader(TensorDataset(torch.randn(64 * STEPS, 64)), batch_size=2))
    if trainer.is_global_zero:
        kept = sum(t.numel() * t.element_size() for t in clock.held)
        result = {kind: statistics.median(times) for kind, times in clock.times.items() if times}
        Path(os.environ["BENCH_DIR"], "result.json").write_text(json.dumps(result | {"MB": kept / 1e6}))


def main() -> None:
    """Start the ranks, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "--min-np", "1", "-H", "localhost:2"]
        env = os.environ | {"BENCH_DIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([*line, sys.executable, __file__, "rank"], env=env, check=True, timeout=400)
        result = json.loads(Path(folder, "result.json").read_text())
    print(f"state of {result['MB']:.0f} MB, 2 ranks, medians in ms")
    for kind, words in (("trainkit", "commit"), ("horovod", "hvd.elastic commit"), ("copy", "bare copy of the same bytes")):
        print(f"  {words:<30}{result[kind]:8.1f}  ({result[kind] / result['copy']:.2f} of the bare copy)")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
