"""Elastic training under `python -m trainkit launch`, on ranks of torch.distributed: workers die,
freeze and come, and each sample counts once, as under horovodrun.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.faults.test_elastic import Ended, Run, check, check_samples, start, survivors
from tests.faults.test_elastic import undisturbed as undisturbed

pytestmark = pytest.mark.parallel

LAUNCH = "python -m trainkit launch"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a job of `trainkit launch` to its end."""
    return functools.partial(start(tmp_path), start_with=LAUNCH)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_worker_is_done_without_and_replaced(
    run: Run, undisturbed: Ended, rank: int
) -> None:
    """The survivor continues alone in its process until the replacement joins, and all end with
    the weights of Horovod's ranks to which nothing happened.
    """
    ended = run({"do": "kill", "rank": rank, "step": 10})
    check(ended, undisturbed)
    assert ended.sizes == [2, 1, 2] and len(survivors(ended)) == 1
    assert "killed by SIGKILL" in ended.text


def test_a_killed_loader_worker_costs_its_rank(run: Run, undisturbed: Ended) -> None:
    """As the system kills one for memory: the rank is replaced, where any other error ends the job."""
    ended = run({"do": "kill_loader", "rank": 1, "step": 10}, num_workers=1)
    check(ended, undisturbed)
    # a busy machine may have the new worker before the other rank sees the loss
    assert ended.sizes in ([2, 1, 2], [2, 2]) and len(survivors(ended)) == 1
    assert re.search(r"A loader worker (is killed by|exited).*: its rank ends", ended.text)


def test_a_frozen_worker_is_replaced(run: Run, undisturbed: Ended) -> None:
    """The driver kills a worker that is stopped: Gloo alone would wait for it."""
    ended = run({"do": "stop", "rank": 1, "step": 10}, stall_s=6)
    check(ended, undisturbed)
    assert ended.sizes[:2] == [2, 1] and len(survivors(ended)) == 1


def test_a_host_that_comes_takes_part(run: Run, undisturbed: Ended) -> None:
    """When a host joins, the ranks commit, and three ranks continue without a lost step."""
    ended = run({"do": "add_host", "step": 5, "host": "127.0.0.1:1"}, waits_for=3)
    check(ended, undisturbed)
    assert ended.sizes == [2, 3] and len(survivors(ended)) == 2


def test_a_worker_that_is_killed_while_the_others_recover(run: Run) -> None:
    """Of four ranks one dies, and another while the ranks form again: two continue."""
    faults = [
        {"do": "kill", "rank": 3, "step": 7},
        {"do": "kill", "rank": 1, "step": 6, "during": "recovery"},
    ]
    ended = run(*faults, np=4, hosts="localhost:4", waits_for=1)
    check_samples(ended)
    assert len(survivors(ended)) == 2, ended.text


def test_a_loop_by_hand_recovers_in_place(run: Run, undisturbed: Ended) -> None:
    """The survivor's own loop continues in its process with a trainkit.Loop, too, to the weights
    and the values of a Task's fit.
    """
    ended = run({"do": "kill", "rank": 0, "step": 10}, by_hand=True)
    check(ended, undisturbed)
    assert ended.sizes == [2, 1, 2] and len(survivors(ended)) == 1


def test_no_survivor_of_several_waits_for_the_killed_one(run: Run) -> None:
    """Three of four ranks continue: the one that has no connection to the killed one learns of it
    from the others, whose loader workers are forks, and none hangs where it ends its groups.
    """
    fault = {"do": "kill", "rank": 2, "step": 10}
    ended = run(fault, np=4, hosts="localhost:4", waits_for=1, stall_s=6, num_workers=1)
    check_samples(ended)
    assert len(survivors(ended)) == 3 and "no progress" not in ended.text, ended.text
