"""A launcher and an engine that do not fit are an error, not several separate runs."""

from __future__ import annotations

import pytest

from tests.helpers.launching import Command

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("horovodrun -np 2 python -m trainkit fit conf=mlp engine=single", "horovodrun started 2 processes"),
        ("torchrun --nproc-per-node 2 -m trainkit fit conf=mlp engine=horovod", "Horovod sees a world of 1"),
        ("horovodrun -np 2 python -m trainkit fit conf=mlp engine=ddp", "Use torchrun, or engine=auto"),
        ("python -m trainkit fit conf=mlp engine=ddp", "engine=ddp needs a launcher"),
        ("python -m trainkit fit conf=mlp engine.num_groups=2", "this launcher's engine is 'single'"),
        ("python -m trainkit fit conf=mlp engine.device=cuda", "torch sees no GPU here"),
    ],
)
def test_a_mismatch_of_launcher_and_engine_raises(line: str, words: str, command: Command) -> None:
    """The message names what was started and what to use, once, and nothing is trained."""
    done = command(line, timeout_s=90)
    assert done.code != 0
    assert done.text.count(words) == 1, done.text
    assert "epoch 1" not in done.text
