"""All commands of docs/horovod.md on MPI run, made small, in the page's order."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.pages import commands
from tests.mpi.jobs import ROOT, run

PAGE = ROOT / "docs" / "horovod.md"
TWO_RANKS = r"^engine         horovod, 2 ranks"
# What each command prints, in the page's order.
PRINTED = {
    "horovod check": r"mpirun -np 2 \(Open MPI .*\)",
    "fit conf=resnet50": TWO_RANKS,
    "horovodrun --mpi": r"engine         horovod, 2 ranks",
    "--hostfile hosts": TWO_RANKS,
    "engine.op=adasum": TWO_RANKS + ".* op adasum",
    "timeline runs/adasum": r"^Steps 20 to 21 on 2 ranks \(horovod, cpu\)",
    "engine.process_set=[0,1]": TWO_RANKS,
}
# One machine is all hosts of the page.
HERE = {"-np 16": "-np 2", "eth1": "lo"}
SMALL = " task.model.width=16 trainer.max_steps=22 trainer.limit_val_batches=1"
SMALL_IMAGES = " data.batch_size=2 trainer.max_steps=1 trainer.limit_val_batches=1"


def test_the_pages_commands_run(tmp_path: Path) -> None:
    """Each of them prints what the page says."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    lines = list(commands(PAGE, "Horovod on MPI"))
    assert len(lines) == len(PRINTED)
    for line, (part, printed) in zip(lines, PRINTED.items(), strict=True):
        assert part in line
        for words, here in HERE.items():
            line = line.replace(words, here)
        small = SMALL_IMAGES if "resnet" in line else SMALL
        done = run(line + small * (" fit " in line), tmp_path)
        assert done.code == 0, f"{line}\n{done.text}"
        assert re.search(printed, done.out, re.MULTILINE), f"{line}\n{done.text}"
