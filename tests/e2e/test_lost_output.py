"""A run that loses its output trains to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Command

FIT = "python -m trainkit fit conf=mlp trainer.max_epochs=1 run_dir=run"


@pytest.mark.parametrize(
    "line",
    [
        f"{FIT} | head -1",
        f"{FIT} > /dev/full",
        f"{FIT} > /dev/full 2>&1",
        f"horovodrun -np 2 {FIT} | head -1",
    ],
)
def test_output_that_cannot_be_written_is_dropped(
    line: str, command: Command, tmp_path: Path
) -> None:
    """The run ends with its checkpoint and exit code 0, and its folder says what was lost."""
    done = command(f"set -o pipefail; {line}".join(["bash -c '", "'"]), timeout_s=120)
    assert done.code == 0, done.text
    assert (tmp_path / "run/checkpoints/last").exists()
    if "horovodrun" not in line:  # there the launcher loses it
        (note,) = (tmp_path / "run/logs/rank-0.txt").read_text().splitlines()[:1]
        assert "stdout cannot be written" in note
        assert "Traceback" not in done.text


def test_a_script_of_the_user_trains_on_too(command: Command, tmp_path: Path) -> None:
    """Prints of the user's own Task end nothing either."""
    (tmp_path / "mine.py").write_text(
        "import trainkit\nfrom tests.helpers.toy import Line, loader\nclass Loud(Line):\n    def"
        " training_step(self, batch, batch_idx):\n        print('x' * 10_000, flush=True)\n       "
        " return super().training_step(batch, batch_idx)\ntrainkit.Trainer(max_epochs=2,"
        " run_dir='run', logger=False).fit(Loud(), loader(16))\n"
    )
    root = str(Path(__file__).parents[2])
    done = command(
        "bash -c 'set -o pipefail; python mine.py | head -1'", timeout_s=120, PYTHONPATH=root
    )
    assert done.code == 0, done.text
    assert (tmp_path / "run/checkpoints/last").exists()
