"""All commands of docs/slurm.md run, made small, in the page's order."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.journals import wait_until
from tests.slurm.conftest import ROOT
from tests.slurm.jobs import run_in

PAGE = (ROOT / "docs" / "slurm.md").read_text()
# What each command prints, in the page's order.
PRINTED = {
    "fit conf=resnet50 launcher=slurm launcher.nodes=4": (
        r"^#!/bin/bash\n(.|\n)*#SBATCH --gpus-per-node=8\n(.|\n)*^srun "
    ),
    "fit conf=resnet50 launcher=slurm launcher.nodes=2": (
        r"\[slurm\] job \d+ is submitted: 2 x 1 ranks; script: .*/runs/mine/"
    ),
    "jobs  ": r"RUNNING|PENDING|COMPLETED",
    "jobs --json": r'"run_dir": "/.*/runs/mine",\n',
    "jobs logs runs/mine": "engine         ddp, 2 ranks",
    "fit conf=mlp launcher=slurm": r"\[slurm\] job \d+ is submitted: 1 x 1 ranks",
    "jobs cancel runs/later": r"job \d+ is cancelled: it had not started\.",
    "srun --nodes=2": "engine         ddp, 2 ranks",
    "export HOROVOD_RENDEZVOUS_SECRET": "engine         horovod, 2 ranks",
}
SMALL = " trainer.max_steps=2 trainer.limit_val_batches=1"


def commands() -> list[str]:
    """Return the page's commands."""
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
        for line in block.splitlines()
    ]


def output(folder: Path) -> str:
    """Return what the page's first job has printed."""
    return "".join(file.read_text() for file in (folder / "runs" / "mine" / "slurm").glob("*.out"))


def test_the_pages_commands_run(cluster: Path, tmp_path: Path) -> None:
    """Each of them prints what the page says; the submitted fit is done when its output is read."""
    lines = commands()
    assert len(lines) == len(PRINTED)
    for line, (start, printed) in zip(lines, PRINTED.items(), strict=True):
        assert start in line
        if "logs" in start:
            wait_until(lambda: "best checkpoint" in output(tmp_path), 240, lambda: output(tmp_path))
        line = line.replace("conf=resnet50", "conf=mlp") + SMALL * (" fit " in line)
        done = run_in(tmp_path, line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert re.search(printed, done.stdout, re.MULTILINE), f"{line}\n{done.stdout}"
        assert "launcher.dry_run=true" not in line or not (tmp_path / "runs").exists()
