"""Trains the golden runs and reads their losses; writes the golden checkpoint.

    python -m tests.golden.record          # writes losses.json and checkpoint/; only for a change that is meant to move them

Losses are stored in float32, for the processor that recorded them, and in float64, for all others:
in float32 another order of additions changes the sixth digit, and 20 steps of a ResNet the second.

Each run takes 20 optimizer steps on one thread a rank and logs the loss of each step. The data is
digits (scikit-learn's own) or tests/golden/text.txt, so nothing but trainkit, torch and the
processor decides the numbers.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import tempfile
from pathlib import Path

import torch

from tests.helpers.launching import run_command
from tests.helpers.toy import Net, loader, quiet, weights

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).parent / "losses.json"
CHECKPOINT = Path(__file__).parent / "checkpoint"
STEPS = 20
TEXT = f"data.root={Path(__file__).parent} data.pattern=text.txt"
RUNS = {
    "mlp": "conf=mlp data.batch_size=16",
    "gpt": f"conf=gpt {TEXT} data.batch_size=2 data.context=32 task.model.width=32",
    "resnet18": "conf=resnet18 data.batch_size=4",
}
COMMON = (
    f"callbacks=none logger=csv engine.device=cpu trainer.max_steps={STEPS}"
    " trainer.log_every_n_steps=1"
)


FLOAT64 = "trainer.precision=64-true"


def processor() -> str:
    """Return the processor's model and the vector instructions that torch uses:
    they decide the last digits of a sum.
    """
    facts = dict(
        re.findall(
            r"^(model name|cpu family|model|stepping)\s*: (.*)$",
            Path("/proc/cpuinfo").read_text(),
            re.M,
        )
    )
    return " / ".join([*facts.values(), torch.backends.cpu.get_cpu_capability()])


def losses(run: str, ranks: int, folder: Path, more: str = "") -> list[str]:
    """Train a golden run; return the loss of each step as metrics.csv writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = f"horovodrun -np {ranks} " if ranks > 1 else ""
    done = run_command(
        f"{launcher}python -m trainkit fit {RUNS[run]} {COMMON} run_dir=golden {more}",
        folder,
        timeout_s=400,
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
    )
    assert done.code == 0, done.text
    return step_losses(folder / "golden" / "metrics.csv")


def step_losses(metrics: Path) -> list[str]:
    """Return the loss of each step."""
    with metrics.open() as file:
        return [row["train/loss_step"] for row in csv.DictReader(file) if row["train/loss_step"]]


def train_net(run_dir: Path, max_steps: int, ckpt_path: str | None = None) -> list[float]:
    """Train a Net (dropout, batch norm, momentum, a schedule) with a checkpoint at its end;
    return its weights.
    """
    task = Net(lr=0.05, momentum=0.9)
    trainer = quiet(
        run_dir,
        max_steps=max_steps,
        max_epochs=None,
        lr_warmup_steps=6,
        enable_checkpointing=True,
        seed=3,
    )
    trainer.fit(task, loader(24, shuffle=True), ckpt_path=ckpt_path)
    return weights(task).tolist()


def write_checkpoint() -> None:
    """Store the checkpoint of step 4, and the weights of step 10 of the run that never stopped."""
    with tempfile.TemporaryDirectory() as folder:
        train_net(Path(folder) / "part", 4)
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
        shutil.copytree((Path(folder) / "part" / "checkpoints" / "last").resolve(), CHECKPOINT)
        whole = train_net(Path(folder) / "whole", 10)
    (CHECKPOINT.parent / "weights.json").write_text(
        json.dumps({"processor": processor(), "weights": whole}) + "\n"
    )


def main() -> None:
    """Write what the runs end with here."""
    torch.set_num_threads(1)
    write_checkpoint()
    stored: dict[str, object] = {"processor": processor()}
    for run in RUNS:
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                stored[f"{run} at {ranks}"] = losses(run, ranks, Path(folder, "32"))
                stored[f"{run} at {ranks} in float64"] = losses(
                    run, ranks, Path(folder, "64"), FLOAT64
                )
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
