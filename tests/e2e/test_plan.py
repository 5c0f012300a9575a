"""`python -m trainkit plan` reports for any number of ranks in one process, and writes no file."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.launching import Command


def test_a_plan_for_ranks_that_are_not_there(command: Command, tmp_path: Path) -> None:
    """One process plans 64 ranks, checks the config as for 64, and writes no file."""
    done = command(
        "python -m trainkit plan conf=mlp ranks=64 ranks_per_host=4 engine.compression=fp16"
        " data.batch_size=4"
    )
    assert done.code == 0, done.text
    assert "plan of conf=mlp at 64 ranks (horovod, 4 a host)" in done.out
    assert "4 per rank x 64 ranks x 1 accumulated = 256 samples" in done.out
    assert "data.batch_size is 4 for each rank" in done.out
    assert "6 gradients, 83.0 KiB" in done.out  # 42,506 parameters in 2 bytes each
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_of_the_engine_asked_for(command: Command) -> None:
    """engine=ddp is planned as under torchrun, and Horovod's options are refused."""
    assert (
        "at 8 ranks (ddp, 8 a host)"
        in command("python -m trainkit plan conf=mlp engine=ddp ranks=8").out
    )
    groups = command("python -m trainkit plan conf=gpt engine=fsdp engine.tensor=2 ranks=8").out
    assert "at 8 ranks (fsdp, 8 a host, 4 data x 2 tensor)" in groups
    assert "16 per data rank x 4 data ranks x 1 accumulated = 64 samples" in groups
    uneven = command("python -m trainkit plan conf=gpt engine=fsdp engine.tensor=3 ranks=8")
    assert (
        uneven.code == 2
        and "engine.tensor is 3, and there are 8 ranks; it must divide them." in uneven.text
    )
    refused = command("python -m trainkit plan conf=mlp engine=ddp engine.num_groups=2 ranks=8")
    assert refused.code == 2
    assert refused.err.startswith("Error: engine.num_groups"), refused.text


def test_a_plan_that_cannot_be(command: Command) -> None:
    """A plan refuses what a fit would refuse."""
    many = command("python -m trainkit plan conf=mlp ranks=4096")
    assert many.code == 1
    assert "samples for 4096 ranks" in many.err
    wrong = command("python -m trainkit plan conf=mlp ranks=few")
    assert (wrong.code, wrong.err.strip()) == (
        2,
        "Error: ranks is 'few'; it must be a whole number, 1 or more.",
    )


def test_a_plan_of_one_rank(command: Command) -> None:
    """Without ranks= the plan is for the ranks of this job."""
    done = command("python -m trainkit plan conf=mlp")
    assert "plan of conf=mlp at 1 rank" in done.out, done.text
    assert "nothing: one rank" in done.out


def test_a_plan_of_some_ranks(command: Command) -> None:
    """With engine.process_set the plan counts the ranks that train."""
    done = command("python -m trainkit plan conf=mlp ranks=4 'engine.process_set=[0,1]'")
    assert "32 per rank x 2 ranks" in done.out, done.text
    wrong = command("python -m trainkit plan conf=mlp ranks=4 'engine.process_set=[0,7]'")
    assert wrong.code == 2
    assert "it must list ranks from 0 to 3" in wrong.err
