"""engine.process_set: a run on some of the ranks is the run of so few ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launching import Command

LAUNCHERS = {
    "horovod": "horovodrun --gloo -np {} python -m trainkit",
    "ddp": "torchrun --nproc-per-node {} -m trainkit",
}


@pytest.mark.parallel
@pytest.mark.parametrize("engine", LAUNCHERS)
def test_ranks_outside_take_no_part(engine: str, command: Command, tmp_path: Path) -> None:
    """Ranks 1 and 2 of three train and validate as two ranks do,
    and rank 0 waits and exits without an error.
    """
    short = "conf=mlp trainer.max_epochs=1 task.model.width=16"
    three, two = (LAUNCHERS[engine].format(ranks) for ranks in (3, 2))
    some = command(f"{three} fit {short} run_dir=some engine.process_set=[1,2]")
    assert some.code == 0, some.text
    assert f"{engine}, 2 ranks" in some.out
    assert some.out.count("epoch 1/1") == 1
    plain = command(f"{two} fit {short} run_dir=plain")
    assert plain.code == 0, plain.text
    ours, theirs = (
        load_file(tmp_path / run / "checkpoints/last/weights.safetensors")
        for run in ("some", "plain")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    validated = command(
        f"{three} validate {short} run_dir=some ckpt_path=last engine.process_set=[1,2]"
    )
    assert validated.code == 0, validated.text
    assert validated.out.count("val/acc") == 1, validated.text


def test_ranks_that_are_not_there(command: Command) -> None:
    """A process set with an unknown rank is refused once."""
    done = command(
        "horovodrun --gloo -np 2 python -m trainkit fit conf=mlp engine.process_set=[1,2]"
    )
    assert done.code != 0
    assert "engine.process_set is [1, 2]; it must list ranks from 0 to 1" in done.text
