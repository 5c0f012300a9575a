"""A launcher and an engine that do not fit are an error, not several separate runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Command

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "horovodrun -np 2 python -m trainkit fit conf=mlp engine=single",
            "horovodrun started 2 processes",
        ),
        (
            "torchrun --nproc-per-node 2 -m trainkit fit conf=mlp engine=horovod",
            "Horovod sees a world of 1",
        ),
        (
            "horovodrun -np 2 python -m trainkit fit conf=mlp engine=ddp",
            "Use torchrun, or engine=auto",
        ),
        ("python -m trainkit fit conf=mlp engine=ddp", "engine=ddp needs a launcher"),
        (
            "python -m trainkit fit conf=mlp engine.num_groups=2",
            "this launcher's engine is 'single'",
        ),
        ("python -m trainkit fit conf=mlp engine.device=cuda", "torch sees no GPU here"),
    ],
)
def test_a_mismatch_of_launcher_and_engine_raises(line: str, words: str, command: Command) -> None:
    """The message names the launcher and the engine to use, once, and nothing is trained."""
    done = command(line, timeout_s=300)
    assert done.code != 0
    assert done.text.count(words) == 1, done.text
    assert "epoch 1" not in done.text


@pytest.mark.parametrize(
    "launcher", ["horovodrun -np 2", "torchrun --nproc-per-node 2 --no-python"]
)
def test_ranks_with_other_settings_end_before_the_first_step(
    launcher: str, command: Command, tmp_path: Path
) -> None:
    """Another rate on rank 1: one message with key, values and ranks, and no run."""
    line = "exec python -m trainkit fit conf=mlp trainer.max_steps=3 run_dir=run"
    script = (
        f'if [ "${{HOROVOD_RANK:-$RANK}}" = 1 ]; then {line} optimizer.lr=0.2; else {line}; fi\n'
    )
    (tmp_path / "start.sh").write_text(script)
    done = command(f"{launcher} bash start.sh", timeout_s=300)
    assert done.code != 0
    assert done.text.count("Ranks differ in what must be equal on all: ") == 1, done.text
    assert "; optimizer.lr is 0.05 on rank 0 and 0.2 on rank 1." in done.text
    assert not (tmp_path / "run").exists()
