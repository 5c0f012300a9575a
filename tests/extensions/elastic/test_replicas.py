"""Replicas of an elastic job whose workers hold the weights together (engine=fsdp engine.replicas=N):
they get ranks together, and are lost and replaced together.
"""

from __future__ import annotations

import signal
from typing import Any

from tests.helpers.simulated_job import Simulated

A, B, C, D = (f"node1/{slot}#1" for slot in range(4))


def started(hosts: dict[str, int] | None = None, **more: Any) -> Simulated:
    """Return a job of two replicas of two ranks that run: A and B, C and D."""
    job = Simulated(hosts or {"node1": 4}, replica_size=2, np=4, **{"min_np": 2} | more)
    job.join(*(start.worker for start in job.starts))
    assert len(job.assignments()) == 4
    job.said.clear()
    return job


def test_a_lost_rank_takes_its_replica_with_it() -> None:
    """When C is killed, D is too; A and B continue at once, and two new workers are started."""
    job = started()
    assert job.assignments() == [A, B, C, D]
    job.exit(C)
    assert job.sent == {D: [signal.SIGKILL]}
    job.join(A, B, commit=7)
    assert job.assignments() == [A, B]
    assert "node1/2#2" in job.alive and "node1/3#2" not in job.alive  # D has not ended yet
    job.exit(D)
    assert "node1/3#2" in job.alive
    assert job.said[0] == "rank 2 (node1, slot 2) was killed by SIGKILL; 2 ranks continue"
    assert (
        "rank 3 (node1, slot 3) has left (was killed by SIGKILL): its replica is not whole: it lost worker "
        in (" ".join(job.said))
    )


def test_a_new_worker_waits_for_the_rest_of_its_replica() -> None:
    """One new worker changes nothing; with the second one the others form ranks with both."""
    job = started()
    job.exit(C, D)
    job.join(A, B, commit=7)
    job.join("node1/3#2")
    assert not job.wanted(A) and job.assignments() == [A, B]
    job.join("node1/2#2")
    assert job.wanted(A)
    job.join(B, commit=9)
    job.join(A, commit=9)
    assert job.assignments() == [A, B, "node1/3#2", "node1/2#2"]


def test_the_replica_with_the_newest_commit_comes_first() -> None:
    """Rank 0 is of the newest commit, and the ranks of a replica stay neighbours in their order."""
    job = started()
    for name, commit in ((A, 6), (B, 6), (D, 7), (C, 7)):
        job.join(name, commit=commit)
    assert job.assignments() == [C, D, A, B]


def test_a_rank_of_every_replica_is_lost() -> None:
    """No whole replica is left: all ranks are replaced, and none of the old ones gets a rank."""
    job = started()
    job.exit(A, D)
    assert job.sent == {B: [signal.SIGKILL], C: [signal.SIGKILL]}
    job.exit(B, C)
    new = [f"node1/{slot}#2" for slot in range(4)]
    job.join(*new)
    assert job.assignments() == new


def test_a_rank_that_waits_leaves_with_its_replica() -> None:
    """A survivor that asks for a rank before the driver knows of the loss is answered to leave."""
    job = started()
    job.join(D, commit=3)
    assert job.state_machine.answer(D) is None
    job.exit(C)
    answer = job.state_machine.answer(D)
    assert answer is not None and answer["answer"] == "leave" and "it lost worker" in answer["why"]


def test_a_replica_that_cannot_work_together_is_replaced() -> None:
    """A rank that lives and says that its replica is broken, as behind a cut cable, leaves with it."""
    job = started()
    job.join(C, commit=3, is_whole=False)
    job.join(A, B, commit=3)
    assert job.state_machine.answer(C) is None and not job.sent
    job.wait(0.5)
    answer = job.state_machine.answer(C)
    assert answer is not None and answer["answer"] == "leave"
    assert job.sent == {D: [signal.SIGKILL]}
    assert job.assignments() == [A, B]


def test_a_killed_rank_is_named_though_its_replica_speaks_first() -> None:
    """C says that its replica is broken before the driver sees that D was killed: D's end is a crash,
    and C leaves at once for it.
    """
    job = started()
    job.join(C, commit=3, is_whole=False)
    job.join(A, B, commit=3)
    job.exit(D)
    answer = job.state_machine.answer(C)
    assert answer is not None and answer["answer"] == "leave"
    assert job.said[0] == "rank 3 (node1, slot 3) was killed by SIGKILL; 2 ranks continue"
    assert answer["why"] == f"its replica is not whole: it lost worker {D}"
    assert job.assignments() == [A, B]


def test_a_slot_that_is_removed_takes_its_replica() -> None:
    """The worker and the other one of its replica leave after a commit; three slots hold one replica
    and a worker that waits.
    """
    job = started()
    job.hosts({"node1": 3})
    assert job.wanted(A) and job.wanted(C) and not job.sent
    job.join(A, B, C, D, commit=4)
    assert job.assignments() == [A, B]
    job.exit(C, D, code=0)
    job.join("node1/2#2")
    assert job.assignments() == [A, B] and not job.wanted(A)


def test_replicas_lie_on_one_host_each_where_possible() -> None:
    """New workers are taken host by host, in whatever order they come."""
    job = Simulated({"node1": 2, "node2": 2}, replica_size=2, np=4, min_np=2)
    job.join("node1/0#1", "node2/0#1", "node2/1#1", "node1/1#1")
    assert job.assignments() == ["node1/0#1", "node1/1#1", "node2/0#1", "node2/1#1"]
    assignment = job.assignment("node2/1#1")
    assert assignment is not None and (assignment.local_rank, assignment.local_size) == (1, 2)


def test_no_more_ranks_than_max_np_in_whole_replicas() -> None:
    """Six waiting workers under --max-np 4 get four ranks."""
    job = started({"node1": 4}, max_np=4)
    job.hosts({"node1": 6})
    assert len(job.alive) == 4
    job.exit(A, B)
    job.join(C, D, commit=2)
    new = [name for name in job.alive if name not in (C, D)]
    job.join(*new)
    job.join(C, D, commit=3)
    assert job.assignments()[:2] == [C, D] and len(job.assignments()) == 4


def test_a_signal_to_the_job_kills_no_rank_that_saves() -> None:
    """Under SIGTERM ranks end one after the other, with 75: those that still write are left alone."""
    job = started()
    job.signal()
    job.sent.clear()
    job.exit(C, code=75)
    assert D not in job.sent
    job.exit(D, A, B, code=75)
    assert job.code == 75


def test_ranks_that_are_done_end_one_after_the_other() -> None:
    """The end of one rank's process with 0 is not the loss of its replica."""
    job = started()
    job.exit(A, code=0)
    assert not job.sent
    job.exit(B, C, D, code=0)
    assert job.code == 0


def test_ranks_with_copies_are_replaced_on_a_spare_host() -> None:
    """Weights in as many parts as ranks: all leave with a lost one, spare slots are used once a host is
    lost, and no second replica forms.
    """
    job = Simulated({"a": 2, "b": 2, "c": 2}, replica_size=4, np=4, min_np=4, max_np=4)
    job.join("a/0#1", "a/1#1", "b/0#1", "b/1#1", copies=1)
    assert job.assignments() == ["a/0#1", "a/1#1", "b/0#1", "b/1#1"]
    job.exit("b/0#1", "b/1#1", code=None)
    assert job.sent.keys() >= {"a/0#1", "a/1#1"}
    job.exit("a/0#1", "a/1#1")
    for name in ("b/0#2", "b/1#2"):  # their host cannot be reached
        if name in job.alive:
            job.exit(name, code=None)
    assert sorted(job.alive) == ["a/0#2", "a/1#2", "c/0#1", "c/1#1"]
    job.join(*job.alive, copies=1)
    assert len(job.assignments()) == 4


def test_further_slots_are_spares_where_ranks_have_copies() -> None:
    """Without --max-np too: a second set of ranks would have no weights of its own."""
    job = Simulated({"a": 4}, replica_size=2, np=2, min_np=2)
    job.join("a/0#1", "a/1#1", "a/2#1", "a/3#1", copies=1)
    (reply,) = job.beat("a/0#1")
    assert len(job.assignments()) == 2 and not reply["why"], "no other generation is asked for"
