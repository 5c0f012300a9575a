"""A fit on a terminal of 80 columns, in one process and under both launchers:
one bar, one line, no prefixes before epochs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.launching import BIN
from tests.helpers.terminal import drawn, on_terminal

pytestmark = pytest.mark.parallel
FIT = (
    "-m trainkit fit conf=mlp trainer.max_epochs=2 trainer.log_every_n_steps=2 data.batch_size=8"
    " run_dir=run"
)


@pytest.mark.parametrize(
    "start",
    [
        "horovodrun -np 2 python",
        "python",
        "torchrun --nproc-per-node 2",
    ],
)
def test_the_bar_stays_at_80_columns(tmp_path: Path, start: str) -> None:
    """A bar on a line of less than 80 columns counts the steps; each epoch is a row of a table;
    the cursor comes back.
    """
    program = str(shutil.which(start.split()[0], path=str(BIN)))
    words = [program, *start.split()[1:], *FIT.split()]
    code, text = on_terminal(words, tmp_path, 80, PATH=f"{BIN}:/usr/bin:/bin", OMP_NUM_THREADS="1")
    assert code == 0, text
    bars = [line for line in drawn(text) if re.search(r"[━╸╺]{8}", line)]
    assert (
        sum(bool(re.match(r"epoch [12]/2  step [━╸╺]{10,} \d+/\d+ ", line)) for line in bars) >= 3
    ), text
    assert [line for line in bars if len(line.rstrip()) >= 80] == []
    assert any("train/loss_step" in line for line in bars)
    rows = [line for line in drawn(text) if re.match(r"epoch [12]/2 +[\d.]+ +[\d.]+", line)]
    assert len(rows) == 2 and not any(">:epoch" in line for line in drawn(text))
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")
