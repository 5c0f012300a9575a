"""Runs of two ranks that are killed, asked to end, or fail to write:
each resumes and ends like a run without faults.
"""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Pairs, wait_for
from tests.helpers.checkpoints import load
from trainkit.checkpoint.format import verify
from trainkit.checkpoint.store import LocalStore
from trainkit.errors import CheckpointError
from trainkit.extensions.check_resume.compare import differences

pytestmark = pytest.mark.parallel


def store(run_dir: Path) -> LocalStore:
    """Return the store of a run's checkpoints."""
    return LocalStore(run_dir / "checkpoints")


def newest(run_dir: Path) -> Path:
    """Return the folder of a run's newest checkpoint."""
    return (run_dir / "checkpoints" / "last").resolve()


def whole_ones(run_dir: Path) -> list[str]:
    """Return the checkpoints that can be loaded."""
    good = []
    for name in store(run_dir).names():
        try:
            verify(store(run_dir).folder / name)
        except CheckpointError:
            continue
        good.append(name)
    return good


def drafts(run_dir: Path) -> list[str]:
    """Return the checkpoints that are being written."""
    folder = run_dir / "checkpoints"
    return [p.name for p in folder.iterdir() if p.name.startswith(".")] if folder.is_dir() else []


def assert_same_run(one: Path, other: Path) -> None:
    """The newest checkpoints are equal bit for bit, metrics included,
    and so are the logged values.
    """
    assert differences(newest(one), newest(other)) == []
    assert (one / "metrics.csv").read_text() == (other / "metrics.csv").read_text()


def kill_again_and_again(
    pairs: Pairs, run_dir: Path, steps: int, kills: int, dice: random.Random
) -> tuple[int, int]:
    """Kill and resume a run so often, then let it end;
    return how many kills hit a save, and how many a step.
    """
    in_save = 0
    had_one = False
    for kill in range(kills):
        pairs.start(run_dir, steps)
        wait_for(lambda: (run_dir / "stepping").exists() or not pairs.alive(), "the first step")
        if kill % 2:  # within a save
            wait_for(lambda: bool(drafts(run_dir)) or not pairs.alive(), "a save")
            time.sleep(dice.uniform(0, 0.02))
        else:
            time.sleep(dice.uniform(0, 0.6))
            # a slow disk saves all the time
            wait_for(lambda: not drafts(run_dir) or not pairs.alive(), "the end of a save")
        pairs.signal(signal.SIGKILL)
        codes = pairs.codes()
        assert codes == [-9, -9], f"kill {kill}: the run ended by itself: {codes}"
        in_save += bool(drafts(run_dir))
        had_one = had_one or bool(store(run_dir).names())
        assert whole_ones(run_dir) or not had_one, f"kill {kill} left no checkpoint"
    pairs.start(run_dir, steps)
    assert pairs.codes() == [0, 0]
    return in_save, kills - in_save


@pytest.mark.timeout(1200)  # fifty starts
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_was_not(tmp_path: Path) -> None:
    """After kills at random points, some inside a save, there is always a checkpoint,
    and the run ends with the same bits.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    kills = 24
    steps = 12 + 6 * kills
    with Pairs(JOB_WIDTH="300000") as pairs:
        pairs.start(tmp_path / "whole", steps)
        assert pairs.codes() == [0, 0]
        in_save, elsewhere = kill_again_and_again(
            pairs, tmp_path / "killed", steps, kills, random.Random(seed)
        )
    assert in_save >= kills // 5, "too few kills came inside a save"
    assert elsewhere >= kills // 5, "too few kills came outside of a save"
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert drafts(tmp_path / "killed") == []
    assert whole_ones(tmp_path / "killed") == whole_ones(tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps without a fault."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    with Pairs() as pairs:
        pairs.start(run_dir, 60)
        assert pairs.codes() == [0, 0]
    return run_dir


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGUSR1, 0),
        (signal.SIGINT, 1),
        (signal.SIGTERM, None),
        (signal.SIGINT, None),
    ],
)
def test_a_signal_on_any_rank_ends_all_with_a_checkpoint(
    tmp_path: Path, whole: Path, number: signal.Signals, rank: int | None
) -> None:
    """If one rank or all processes are asked to end, both ranks exit with 75 after the same step,
    and the run resumes.
    """
    with Pairs() as pairs:
        pairs.start(tmp_path / "asked", 60)
        wait_for((tmp_path / "asked" / "stepping").exists, "the first step")
        time.sleep(random.uniform(0, 0.5))
        asked = time.monotonic()
        pairs.signal(number, rank, workers=rank is None)
        assert pairs.codes() == [75, 75]
        assert time.monotonic() - asked < 30  # Slurm's and Kubernetes' usual grace
        log = (tmp_path / "asked.rank0.log").read_text()
        found = re.search(
            rf"{number.name} on rank {rank or 0}.*: the run ended after step (\d+); to resume:"
            r" ckpt_path=last",
            log,
        )
        assert found, log
        assert verify(newest(tmp_path / "asked"))["global_step"] == int(found[1])
        pairs.start(tmp_path / "asked", 60)
        assert pairs.codes() == [0, 0]
    assert_same_run(whole, tmp_path / "asked")


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """A rank that gets a second signal exits without a checkpoint."""
    with Pairs(JOB_STUCK="1") as pairs:
        pairs.start(tmp_path / "run", 30)
        wait_for(
            lambda: len(list((tmp_path / "run").glob("stuck*"))) == 2,
            "the step that takes forever",
        )
        pairs.signal(signal.SIGTERM)
        time.sleep(1.5)  # what follows within a second is the same request
        assert pairs.alive()
        pairs.signal(signal.SIGTERM)
        assert pairs.codes() == [-15, -15]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    """If the disk fills up, training continues, older checkpoints stay,
    and each failed write is reported.
    """
    with Pairs(JOB_FILE_LIMIT_FROM_STEP="7", JOB_WIDTH="5000") as pairs:
        pairs.start(tmp_path / "run", 14)
        assert pairs.codes() == [0, 0]
    log = (tmp_path / "run.rank0.log").read_text()
    assert re.search(r"step=9 was NOT written: .*\. Older ones are left\.", log)
    assert re.search(r"Checkpoints that were NOT written: .*step=9.*step=12", log)
    assert drafts(tmp_path / "run") == []
    # that of step 6 may still be on its way at step 7
    assert verify(newest(tmp_path / "run"))["global_step"] in (5, 6)
    assert load("last", [store(tmp_path / "run")], _Anything(), resume=True) is not None


class _Anything:
    """Takes any weights."""

    def load_state_dict(self, state: object) -> None:
        """Take them."""
