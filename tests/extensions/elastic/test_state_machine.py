"""The elastic job's state machine:
which workers get a rank, which are replaced, and how a job ends.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.helpers.simulated_job import Simulated
from trainkit.extensions.elastic import state_machine
from trainkit.extensions.elastic.job import Job
from trainkit.extensions.elastic.messages import Decision, Words
from trainkit.extensions.elastic.transitions import settle

A, B = "node1/0#1", "node1/1#1"


def started(**more: Any) -> Simulated:
    """Return a job of two ranks that run, A rank 0 and B rank 1."""
    job = Simulated(**more)
    job.join(A, B)
    assert job.assignments() == [A, B]
    job.said.clear()
    return job


def test_the_first_generation_waits_for_np_ranks() -> None:
    """With -np 2 --min-np 1 a single rank does not start."""
    job = Simulated()
    job.join(A)
    job.wait(30)
    assert job.assignments() == [] and job.state_machine.answer(A) is None
    job.join(B)
    assert job.state_machine.answer(A) == {
        "answer": "rank",
        "generation": 1,
        "rank": 0,
        "size": 2,
        "local_rank": 0,
        "local_size": 2,
        "cross_rank": 0,
        "cross_size": 1,
    }
    assert job.said == ["2 ranks on node1, generation 1"]


def test_the_first_workers_are_counted_for_their_placeholders() -> None:
    """The first -np processes get their number in the first generation, later ones get none."""
    job = Simulated({"node1": 3}, max_np=3)
    assert [start.first for start in job.starts] == [0, 1, None]


def test_a_killed_rank_does_not_hold_up_the_other() -> None:
    """The survivor gets a rank at once;
    the dead one's slot a new process, which joins as soon as it can.
    """
    job = started()
    job.exit(B)
    assert job.wanted(A)
    assert job.alive == [A, "node1/1#2"]
    job.join(A, commit=7)
    assert job.assignments() == [A]
    job.join("node1/1#2")
    assert job.wanted(A)
    job.join(A, commit=9)
    assert job.assignments() == [A, "node1/1#2"]
    assert job.said[0] == "rank 1 (node1, slot 1) was killed by SIGKILL; 1 rank continues"
    assert (
        job.said[2]
        == "1 rank on node1, generation 2: rank 1 (node1, slot 1) was killed by SIGKILL; formed"
        " 0.00 s later"
    )
    assert (
        job.said[-1] == "2 ranks on node1, generation 3: worker node1/1#2 came; formed 0.00 s later"
    )


def test_rank_0_is_the_one_with_the_newest_commit() -> None:
    """When rank 0 is killed, the survivor with the newest step becomes rank 0,
    and a new worker without state never does.
    """
    job = Simulated({"node1": 2, "node2": 1}, np=3)
    job.join(A, B, "node2/0#1")
    job.exit(A)
    job.join("node1/0#2")
    job.join(B, commit=4)
    job.join("node2/0#1", commit=5)
    assert job.assignments() == ["node2/0#1", B, "node1/0#2"]


def test_ranks_of_a_host_are_consecutive() -> None:
    """Workers that join in any order are grouped by host, and cross ranks count hosts."""
    job = Simulated({"node1": 2, "node2": 2}, np=4)
    job.join(A, "node2/0#1", B, "node2/1#1")
    assert job.assignments() == [A, B, "node2/0#1", "node2/1#1"]
    assignment = job.assignment("node2/1#1")
    assert assignment is not None and (
        assignment.local_rank,
        assignment.cross_rank,
        assignment.cross_size,
    ) == (1, 1, 2)


def test_max_np_limits_processes() -> None:
    """No more processes are started than there are ranks;
    a free slot elsewhere replaces one that crashed.
    """
    job = Simulated({"node1": 2, "node2": 2}, max_np=2)
    assert job.alive == [A, B]
    job.join(A, B)
    job.exit(B)
    assert job.alive == [A, "node2/0#1"]


def test_a_worker_too_many_continues_to_wait() -> None:
    """A host that left and returned was replaced meanwhile: the third of two ranks is a spare."""
    job = Simulated({"node1": 2, "node2": 1}, max_np=2)
    job.join(A, B)
    job.hosts({"node1": 1, "node2": 1})
    assert job.alive == [A, B, "node2/0#1"]
    job.hosts({"node1": 2, "node2": 1})
    job.join("node2/0#1")
    assert not job.wanted(A), "there is no room for it"
    job.join(A, B, commit=4)
    assert job.assignments() == [A, B]
    job.exit(B)
    job.join(A, commit=5)
    assert job.assignments() == [A, "node2/0#1"]


def test_a_worker_that_dies_between_join_and_rank_gets_none() -> None:
    """A worker that joined and died does not wait for a rank any more."""
    job = Simulated()
    job.join(A)
    job.exit(A)
    job.join(B)
    assert job.assignments() == []
    job.join("node1/0#2")
    assert job.assignments() == [B, "node1/0#2"]


def test_a_rank_that_was_lost_on_its_way_is_given_again() -> None:
    """A worker that asks with its old generation never got the new rank: it gets the same one."""
    job = started()
    job.join(A, generation=0)
    assert job.assignments() == [A, B] and not job.wanted(B)
    answer = job.state_machine.answer(A)
    assert answer is not None and (answer["answer"], answer["rank"]) == ("rank", 0)


def test_all_killed_after_a_rank_are_all_replaced() -> None:
    """The job resumes from its checkpoint with new processes."""
    job = started()
    job.exit(A, B)
    assert job.alive == ["node1/0#2", "node1/1#2"]
    job.join(*job.alive)
    assert len(job.assignments()) == 2


def test_newcomers_without_a_survivor_wait_for_one_another_but_not_for_long() -> None:
    """No worker has state to resume from: the second may join in a moment, or hang."""
    job = started()
    job.exit(A, B)
    job.join("node1/0#2")
    job.wait(9)
    assert job.assignments() == []
    job.wait(2)
    assert job.assignments() == ["node1/0#2"]


def test_all_killed_before_a_rank_end_the_job() -> None:
    """A process that crashes before it has joined would crash again."""
    job = Simulated()
    job.exit(A)
    assert job.code is None
    job.exit(B)
    assert job.code == 1


def test_a_slot_that_crashes_again_waits_longer_each_time() -> None:
    """At once, then after 1, 2 and 4 seconds; the fifth crash without a step gives the slot up."""
    job = started()
    pauses = []
    job.exit(B)
    for _ in range(3):
        job.exit(job.alive[-1])
        before = job.now
        while len(job.alive) < 2:
            job.wait(0.5)
        pauses.append(job.now - before)
    job.exit(job.alive[-1])
    job.wait(100)
    assert pauses == [1, 2, 4]
    assert job.alive == [A]
    assert job.said[-1] == "slot 1 of node1 is given up: 5 crashes without a step in between"


def test_the_cooldown_range_pauses_from_the_first_crash() -> None:
    """--blacklist-cooldown-range 3 9: three seconds, then six, then nine, whatever was trained between, as
    Horovod leaves a host out; the slot is not given up for crashes with steps between.
    """
    job = started(pause_s=(3.0, 9.0), cools_down=True)
    pauses = []
    for step in range(2, 14, 2):
        job.beat(*job.assignments(), step=step)
        job.beat(*job.assignments(), step=step + 1)
        job.exit(job.alive[-1])
        before = job.now
        while len(job.alive) < 2:
            job.wait(0.5)
        pauses.append(job.now - before)
        job.join(*reversed(job.alive), commit=step)
        assert len(job.assignments()) == 2
    assert pauses == [3, 6, 9, 9, 9, 9]
    said = [text.partition(" in ")[2] for text in job.said if "filled again" in text]
    assert said[:2] == ["3 s: crash 1", "6 s: crash 2"]


def test_a_slot_is_not_given_up_while_its_workers_get_on() -> None:
    """A slot with steps between its crashes is never given up, and refilled at once."""
    job = started()
    for step in range(1, 20):
        late = job.alive[-1]
        job.beat(A, late, step=step)
        job.exit(late)
        job.join(A, commit=step)
        assert len(job.alive) == 2
        job.join(job.alive[-1])
        job.join(A, commit=step)


def test_a_worker_that_stepped_is_replaced_at_once_again() -> None:
    """A crash after a worker's own steps counts as a first crash."""
    job = started()
    for step in range(2, 9, 2):
        job.beat(*job.assignments(), step=step)
        job.beat(*job.assignments(), step=step + 1)
        job.exit(job.alive[-1])
        assert len(job.alive) == 2, "replaced without a pause"
        job.join(*reversed(job.alive), commit=step)
        assert len(job.assignments()) == 2


@pytest.mark.parametrize("code", [1, 2, 3, 127])
def test_an_error_of_the_users_ends_the_job_with_its_code(code: int) -> None:
    """No other worker is reported, nothing is restarted: the others learn that the job is over."""
    job = started()
    job.exit(B, code=code)
    assert job.code == code and job.alive == [A] and job.wanted(A)
    job.join(A)
    answer = job.state_machine.answer(A)
    assert answer is not None and answer["answer"] == "end" and "exit code" in answer["why"]
    job.exit(A, code=1)
    assert job.state_machine.finished and job.code == code


def test_who_does_not_end_with_the_job_is_ended() -> None:
    """Ten seconds, then SIGTERM, then SIGKILL."""
    job = started()
    job.exit(B, code=3)
    job.wait(9)
    assert job.sent == {}
    job.wait(2)
    assert job.sent == {A: [signal.SIGTERM]}
    job.wait(10)
    assert job.sent == {A: [signal.SIGTERM, signal.SIGKILL]}


def test_a_preempted_worker_is_not_replaced() -> None:
    """Exit code 75 is its own will: the slot stays free until the longest pause is over."""
    job = started()
    job.exit(B, code=75)
    assert job.wanted(A)
    job.join(A, commit=3)
    assert job.assignments() == [A]
    job.wait(59)
    assert job.alive == [A]
    job.wait(2)
    assert job.alive == [A, "node1/1#2"]


def test_a_preempted_slot_is_filled_when_its_host_comes_back() -> None:
    """The host goes and returns: its slots start afresh."""
    job = Simulated({"node1": 1, "node2": 1})
    job.join(A, "node2/0#1")
    job.exit("node2/0#1", code=75)
    job.hosts({"node1": 1})
    assert job.alive == [A]
    job.hosts({"node1": 1, "node2": 1})
    assert job.alive == [A, "node2/0#2"]


def test_a_job_whose_workers_all_left_ends_with_75() -> None:
    """All were preempted: try again."""
    job = started()
    job.exit(A, B, code=75)
    assert job.code == 75


def test_a_crash_beside_a_preemption_is_still_replaced() -> None:
    """One left, the other was killed: the job continues with the killed one's successor."""
    job = started()
    job.exit(B, code=75)
    job.exit(A)
    assert job.code is None and job.alive == ["node1/0#2"]


def test_a_preemption_while_another_slot_pauses_is_not_the_end() -> None:
    """No worker lives, but a replacement is due in a second."""
    job = started()
    job.exit(A)
    job.exit("node1/0#2")
    job.exit(B, code=75)
    assert job.alive == [] and job.code is None
    job.wait(1)
    assert job.alive == ["node1/0#3"]


def test_a_job_is_done_when_rank_0_is() -> None:
    """All end with exit code 0, one after the other."""
    job = started()
    job.exit(B, code=0)
    assert not job.wanted(A), "no worker is asked to join a job that ends"
    job.exit(A, code=0)
    assert job.code == 0 and job.starts[-1].worker == B


def test_a_rank_that_waits_for_none_after_the_first_is_done_is_left_alone() -> None:
    """It may write the last checkpoint for minutes;
    thirty seconds in a collective end it: the other rank will not join.
    """
    job = started()
    job.exit(B, code=0)
    for _ in range(100):
        job.wait(1)
        job.beat(A, step=9)
    assert job.sent == {}
    job.beat(A, step=9, waiting="the barrier")
    job.wait(31)
    assert job.sent == {A: [signal.SIGTERM]}


def test_a_straggler_that_is_ended_is_not_too_few_workers() -> None:
    """While the last worker is being killed, --elastic-timeout does not count."""
    job = started(timeout_s=2.0)
    job.exit(A, code=0)
    job.beat(B, waiting="the sums of gradients")
    job.wait(42)
    assert job.sent[B] == [signal.SIGTERM, signal.SIGKILL]
    job.exit(B)
    assert job.code == 0


def test_a_killed_rank_0_of_a_job_that_is_nearly_done_fails_it() -> None:
    """The rank that saves was killed while the other was done: not a success."""
    job = started()
    job.exit(B, code=0)
    job.exit(A)
    assert job.code == 137


def test_a_newcomer_to_a_job_that_is_nearly_done_is_sent_home() -> None:
    """No work is left for it."""
    job = started()
    job.exit(B)
    job.exit(A, code=0)
    assert job.sent == {"node1/1#2": [signal.SIGKILL]}
    job.exit("node1/1#2")
    assert job.code == 0


def test_a_host_that_is_gone_takes_its_workers_with_it() -> None:
    """They are sent away when they join; the others continue without them."""
    job = Simulated({"node1": 1, "node2": 1})
    job.join(A, "node2/0#1")
    job.hosts({"node1": 1})
    assert job.wanted(A) and job.wanted("node2/0#1")
    job.join("node2/0#1", commit=5)
    answer = job.state_machine.answer("node2/0#1")
    assert answer == {"answer": "leave", "why": "slot 0 of node2 was removed"}
    job.join(A, commit=5)
    assert job.assignments() == [A]
    job.exit("node2/0#1", code=0)
    assert job.code is None and job.alive == [A]


def test_a_worker_that_does_not_leave_is_ended() -> None:
    """Thirty seconds after its host went, SIGTERM, and then SIGKILL."""
    job = Simulated({"node1": 1, "node2": 1})
    job.join(A, "node2/0#1")
    job.hosts({"node1": 1})
    job.wait(29)
    assert job.sent == {}
    job.wait(2)
    assert job.sent == {"node2/0#1": [signal.SIGTERM]}
    job.wait(10)
    assert job.sent == {"node2/0#1": [signal.SIGTERM, signal.SIGKILL]}


@pytest.mark.parametrize("code", [1, 75, -9, None])
def test_how_a_worker_ends_whose_host_is_gone_does_not_matter(code: int | None) -> None:
    """A host that shuts down ends its processes in many ways; none of them is the user's error."""
    job = Simulated({"node1": 1, "node2": 1})
    job.join(A, "node2/0#1")
    job.hosts({"node1": 1})
    job.exit("node2/0#1", code=code)
    job.join(A, commit=1)
    assert job.code is None and job.assignments() == [A] and job.alive == [A]


def test_a_host_that_comes_back_in_time_keeps_its_worker() -> None:
    """Removed and added again before any worker joined: nothing happens."""
    job = Simulated({"node1": 1, "node2": 1})
    job.join(A, "node2/0#1")
    job.hosts({"node1": 1})
    job.hosts({"node1": 1, "node2": 1})
    assert not job.wanted(A) and not job.wanted("node2/0#1")
    job.wait(60)
    assert job.sent == {}


def test_the_highest_slots_go_first() -> None:
    """A host that loses one of its slots keeps its first one."""
    job = started()
    job.hosts({"node1": 1})
    assert job.wanted(B)
    job.join(B, A)
    assert job.assignments() == [A]


def test_a_new_host_is_taken_in() -> None:
    """Its process starts at once, and the others are requested to join when it has joined."""
    job = started()
    job.hosts({"node1": 2, "node2": 1})
    assert job.alive == [A, B, "node2/0#1"] and not job.wanted(A)
    job.join("node2/0#1")
    assert job.wanted(A) and job.wanted(B)
    job.join(A, B, commit=2)
    assert job.assignments() == [A, B, "node2/0#1"]


def test_too_few_workers_for_too_long_end_the_job() -> None:
    """min-np of np: a replacement is awaited for as long as --elastic-timeout allows."""
    job = Simulated({"node1": 1, "node2": 1}, min_np=2, timeout_s=5.0)
    job.join(A, "node2/0#1")
    job.hosts({"node1": 1})
    job.exit("node2/0#1")
    job.join(A)
    job.wait(4)
    assert job.code is None
    job.wait(2)
    assert job.code == 1
    over = job.state_machine.job.over
    assert (
        over is not None
        and "1 worker for 5 s (--elastic-timeout), and 2 are needed (--min-np)" in over.why
    )


def test_the_timeout_begins_again_with_each_generation() -> None:
    """Two losses of four seconds each do not exceed five seconds."""
    job = Simulated({"node1": 1, "node2": 1}, min_np=2, timeout_s=5.0)
    job.join(A, "node2/0#1")
    for count in (1, 2):
        job.hosts({"node1": 1})
        job.exit(f"node2/0#{count}")
        job.join(A)
        job.wait(4)
        job.hosts({"node1": 1, "node2": 1})
        job.join(f"node2/0#{count + 1}")
        assert len(job.assignments()) == 2


def test_a_rank_that_cannot_continue_alone_is_said_to_wait() -> None:
    """With --min-np 2 of 2 the other waits for a replacement;
    too few slots at the start are reported, too.
    """
    job = started(min_np=2)
    job.exit(B)
    assert (
        job.said[0]
        == "rank 1 (node1, slot 1) was killed by SIGKILL; 1 rank waits for 1 more (--min-np)"
    )
    few = Simulated({"node1": 1})
    assert few.said == ["1 slot available, 2 are needed to start: waiting for more hosts"]


def test_a_replacement_in_time_stops_the_clock() -> None:
    """A process that starts is waited for."""
    job = started(min_np=2, timeout_s=5.0)
    job.exit(B)
    job.join(A, commit=1)
    job.wait(60)
    assert job.code is None
    job.join("node1/1#2")
    assert job.assignments() == [A, "node1/1#2"]


def test_a_process_that_never_joins_is_ended() -> None:
    """After ten minutes it counts as crashed."""
    job = started()
    job.exit(B)
    job.wait(599)
    assert job.sent == {}
    job.wait(2)
    assert job.sent == {"node1/1#2": [signal.SIGKILL]}


def test_the_reset_limit_ends_the_job() -> None:
    """--reset-limit 1: one change is allowed, the second ends the job;
    new workers alone cause none then.
    """
    job = started(reset_limit=1)
    job.exit(B)
    job.join(A, commit=1)
    assert job.assignments() == [A]
    job.join("node1/1#2")
    assert not job.wanted(A) and job.code is None
    job.exit(A)
    assert job.code == 1


def test_a_signal_reaches_all_and_no_worker_is_replaced() -> None:
    """SIGTERM to horovodrun: each gets it; all leave with 75, and so does the job."""
    job = started()
    job.signal()
    assert job.sent == {A: [signal.SIGTERM], B: [signal.SIGTERM]}
    job.exit(A, B, code=75)
    assert job.code == 75


@pytest.mark.parametrize(
    ("codes", "code"),
    [((75, 0), 75), ((0, 0), 0), ((75, 3), 3), ((-9, 75), 137), ((-15, -15), 143)],
)
def test_after_a_signal_the_exit_code_is_the_workers(codes: tuple[int, int], code: int) -> None:
    """75 if all left so, else the first error."""
    job = started()
    job.signal()
    job.exit(A, code=codes[0])
    job.exit(B, code=codes[1])
    assert job.code == code


def test_a_host_that_is_lost_after_a_signal_does_not_change_the_exit_code() -> None:
    """The other rank has written the checkpoint from which the same command resumes."""
    job = started()
    job.signal()
    job.exit(B, code=None)
    job.exit(A, code=75)
    assert job.code == 75


def test_who_does_not_heed_a_signal_is_killed() -> None:
    """After 30 seconds of grace."""
    job = started()
    job.signal()
    job.wait(29)
    assert job.sent[A] == [signal.SIGTERM]
    job.wait(2)
    assert job.sent[A] == [signal.SIGTERM, signal.SIGKILL]


def test_slurms_signal_is_sigterm_to_the_workers() -> None:
    """SIGUSR1 to the driver, by `--signal=USR1@60`: a program may not handle it."""
    job = started()
    job.signal(signal.SIGUSR1)
    assert job.sent == {A: [signal.SIGTERM], B: [signal.SIGTERM]}
    assert "SIGUSR1 received: all workers get SIGTERM" in job.said[-1]
    job.exit(A, B, code=75)
    assert job.code == 75


def test_a_signal_before_any_rank_ends_with_the_signals_code() -> None:
    """No worker had state to save."""
    job = Simulated()
    job.signal(signal.SIGINT)
    job.exit(A, B, code=-2)
    assert job.code == 130


def test_no_worker_is_called_away_after_a_signal() -> None:
    """Each ends by itself at its next step: to join again would cost the grace."""
    job = started()
    job.signal()
    job.exit(B, code=75)
    assert not job.wanted(A)


def test_survivors_of_a_signal_still_get_a_rank() -> None:
    """A rank exited before the other has saved: the other needs a generation in which to end."""
    job = started()
    job.signal()
    job.exit(B, code=75)
    job.join(A, commit=3)
    assert job.assignments() == [A]


def test_a_frozen_worker_is_killed_and_replaced() -> None:
    """Silent for longer than stall_s while its process lives."""
    job = started()
    job.beat(A, B, stall_s=5)
    for step in range(6):
        job.wait(1)
        job.beat(A, step=step, stall_s=5)
    assert job.sent == {B: [signal.SIGKILL]}
    job.exit(B)
    assert "sent no heartbeat for 5 s" in job.said[0]
    assert job.alive == [A, "node1/1#2"]


def test_who_freezes_before_its_first_beat_is_killed_too() -> None:
    """It has its rank and has not sent its limit yet: the others' limit applies."""
    job = started()
    for step in range(7):
        job.beat(A, step=step, stall_s=5)
        job.wait(1)
    assert job.sent == {B: [signal.SIGKILL]}
    job.exit(B)
    assert "sent no heartbeat for 5 s" in job.said[0]
    assert job.alive == [A, "node1/1#2"]


def test_ranks_that_are_all_new_have_the_limit_of_those_before() -> None:
    """All ranks were lost, and one of the new ones waits for peers that have joined again."""
    job = started()
    job.beat(A, B, stall_s=5)
    job.exit(A, B)
    c, d = "node1/0#2", "node1/1#2"
    job.join(c, d)
    assert job.assignments() == [c, d]
    job.beat(c, waiting="the other ranks to connect")
    job.join(d)
    for _ in range(9):
        job.wait(1)
        job.beat(c, d, waiting="the other ranks to connect")
    assert job.sent == {c: [signal.SIGKILL]}
    job.exit(c)
    assert job.assignments() == [d]


def test_a_driver_that_was_stopped_itself_blames_no_worker() -> None:
    """Ctrl-Z for ten minutes, or a machine that slept."""
    job = started()
    job.beat(A, B, stall_s=5)
    job.sleep(600)
    assert job.sent == {}
    job.wait(6)
    assert set(job.sent) == {A, B}


def hang(job: Simulated, seconds: int, **waiting: str) -> list[str]:
    """Let all send heartbeats without progress; return the workers with a request for stacks."""
    asked = []
    for _ in range(seconds):
        job.wait(1)
        for name, what in (("A", A), ("B", B)):
            if what in job.alive and job.beat(what, waiting=waiting[name], stall_s=5)[0]["dump"]:
                asked.append(what)
    return asked


def test_who_holds_up_the_others_writes_its_stacks_and_is_killed() -> None:
    """B waits for nothing and is stuck while A waits for it."""
    job = started()
    assert hang(job, 7, A="grads", B="") == [A, B]
    assert job.sent == {}
    hang(job, 2, A="grads", B="")
    assert job.sent == {B: [signal.SIGKILL]}
    assert (
        "rank 1 (node1, slot 1) has made no progress for 6 s and waits for nothing, while rank 0"
        in job.said[0]
    )


def test_it_is_killed_after_all_stacks_are_written() -> None:
    """A worker's next heartbeat says so; one that sends none meanwhile is waited for."""
    job = started()
    hang(job, 7, A="grads", B="")
    for _ in range(4):  # A writes its stacks for so long
        job.wait(1)
        job.beat(B, stall_s=5)
        assert job.sent == {}
    job.beat(A, waiting="grads", stall_s=5)
    assert job.sent == {B: [signal.SIGKILL]}


def test_ranks_that_wait_for_a_lost_one_are_no_deadlock() -> None:
    """The process of a frozen rank on a host that is cut off does not end;
    the others wait for their connections.
    """
    job = Simulated({"node1": 3}, np=3)
    c = "node1/2#1"
    job.join(A, B, c)
    job.beat(A, B, c, stall_s=5)
    hang(job, 6, A="grads", B="grads")
    assert job.sent == {c: [signal.SIGKILL]}  # no heartbeat
    hang(job, 20, A="grads", B="grads")
    assert job.code is None and A not in job.sent and B not in job.sent


def test_a_slow_rank_that_no_rank_waits_for_is_left_alone() -> None:
    """If no worker is in a collective, no worker is blocked."""
    job = started()
    assert hang(job, 60, A="", B="") == [] and job.sent == {}


def test_a_rank_alone_waits_for_no_other() -> None:
    """In a job with one rank, a slow step blocks no other."""
    job = Simulated({"node1": 1}, np=1)
    job.join(A)
    for _ in range(60):
        job.wait(1)
        job.beat(A, waiting="grads", stall_s=5)
    assert job.code is None and job.sent == {}


def test_ranks_that_wait_for_one_another_end_the_job() -> None:
    """Both in collectives that never match: stacks, then an error with what each waits for."""
    job = started()
    assert hang(job, 9, A="grads", B="val/loss") == [A, B]
    assert job.code == 1
    over = job.state_machine.job.over
    assert over is not None and "waited for grads" in over.why and "waited for val/loss" in over.why


def test_a_stall_that_dissolves_in_time_has_no_victim() -> None:
    """Two seconds after the request for stacks it continued."""
    job = started()
    hang(job, 7, A="grads", B="")
    job.beat(B, step=1, stall_s=5)
    hang(job, 4, A="grads", B="")
    assert job.sent == {}


def test_a_rank_that_never_comes_to_join_is_killed() -> None:
    """A has waited for a new generation for longer than stall_s;
    B hangs in a collective of the old one.
    """
    job = started()
    job.beat(A, B, stall_s=5)
    job.join(A)
    hang(job, 9, A="", B="grads")
    assert job.sent == {B: [signal.SIGKILL]}


def test_a_lost_ssh_connection_is_a_crash() -> None:
    """The link's end is no exit code of the user's."""
    job = started()
    job.exit(B, code=None)
    assert "was lost: the ssh connection" in job.said[0] and job.alive == [A, "node1/1#2"]


def test_another_backends_words_are_used() -> None:
    """The text for a lost link, and the options' names, are those of the backend:
    no word of ssh, no option of horovodrun.
    """
    words = Words(
        "launcher.num_workers",
        "launcher.num_workers",
        lost="its actor ended",
        reached="reached by Ray",
    )
    job = Simulated(words=words, min_np=2)
    job.join(A, B)
    job.exit(B, code=None)
    assert job.said[-2].endswith(
        "was lost: its actor ended; 1 rank waits for 1 more (launcher.num_workers)"
    )
    job = Simulated({"node1": 1}, np=1, words=words)
    job.exit("node1/0#1", code=None)
    assert "no host can be reached by Ray (node1)" in job.state_machine.job.over.why  # type: ignore[union-attr]


def test_failures_are_limited_and_growth_is_none() -> None:
    """max_failures counts generations that a crash ended:
    two ranks lost at once are one, a rank that comes is none.
    """
    job = Simulated({"node1": 2}, np=2, min_np=1, max_failures=1)
    job.join(A, B)
    job.hosts({"node1": 2, "node2": 1})
    job.join(job.alive[-1])
    job.join(A, B)
    assert job.state_machine.job.generation == 2 and not job.state_machine.job.failed
    job.exit(A, B)
    assert job.state_machine.job.over is None and len(job.state_machine.job.failed) == 1
    for name in list(job.alive):
        job.join(name)
    assert job.state_machine.job.generation == 3
    job.exit(job.alive[0])
    assert job.code == 1


def test_a_host_that_cannot_be_reached_is_tried_again_and_again() -> None:
    """A reboot, or a broken switch:
    by one worker at a time, with growing pauses, and its slots are not given up.
    """
    job = Simulated({"node1": 1, "node2": 2}, np=1)
    job.join("node1/0#1")
    tried = []
    for _ in range(600):
        for name in [name for name in job.alive if name.startswith("node2")]:
            tried.append(job.now)
            job.exit(name, code=None)
        job.wait(1)
        job.beat("node1/0#1", step=1)
    pauses = [
        after - before for before, after in zip(tried, tried[1:], strict=False) if after > before
    ]
    assert pauses[:6] == [1, 2, 4, 8, 16, 32] and set(pauses[6:]) == {60}
    assert not any("given up" in text for text in job.said)
    assert len([text for text in job.said if text.startswith("node2 cannot be reached")]) == 7, (
        "each pause is named once"
    )
    while not (back := [name for name in job.alive if name.startswith("node2")]):
        job.wait(1)
        job.beat("node1/0#1", step=1)
    assert len(back) == 1
    job.join(*back)
    assert "node2 can be reached again" in job.said
    assert len([name for name in job.alive if name.startswith("node2")]) == 2


def test_a_job_without_a_host_that_can_be_reached_ends() -> None:
    """A misspelled name is no reason to wait."""
    job = Simulated({"noed1": 1, "noed2": 1})
    job.exit("noed1/0#1", "noed2/0#1", code=None)
    assert job.code == 1 and job.state_machine.job.over is not None
    assert "no host can be reached by ssh (noed1, noed2)" in job.state_machine.job.over.why


def test_an_unknown_worker_is_ended() -> None:
    """A process that the driver has seen end, or never started."""
    job = started()
    job.join("node9/0#1")
    answer = job.state_machine.answer("node9/0#1")
    assert answer is not None and answer["answer"] == "end"


def test_a_newcomer_that_fails_of_itself_is_no_end_of_the_job() -> None:
    """A host without the data, or with another Python:
    its slot is given up in the end, and the others train.
    """
    job = started()
    job.beat(A, B, step=5)
    job.exit(B)
    job.join(A, commit=5)
    late = job.alive[-1]
    assert late != A
    job.join(late)
    job.join(A, commit=6)
    job.exit(late, code=1)
    assert job.code is None and A in job.alive


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_ends_the_job_in_the_first_steps_too(late: bool) -> None:
    """It is no fault of the host, though the rank has taken no step yet."""
    job = started()
    name = B
    if late:
        job.beat(A, B, step=5)
        job.exit(B)
        job.join(A, commit=5)
        name = job.alive[-1]
        job.join(name)
    job.beat(name, raised=True)
    job.join(A, commit=6)
    job.exit(name, code=3)
    assert job.code == 3


def test_a_program_that_never_asks_for_a_rank_is_named() -> None:
    """Not "done"."""
    job = Simulated()
    job.exit(A, code=0)
    assert job.code == 1 and job.state_machine.job.over is not None
    assert "never requested a rank" in job.state_machine.job.over.why


def test_a_newcomer_that_hangs_in_its_set_up_is_found_out() -> None:
    """It has not sent its limit yet: the others' limit applies."""
    job = started()
    job.beat(A, B, step=5, stall_s=8.0)
    job.exit(B)
    job.join(A, commit=5)
    late = job.alive[-1]
    job.join(late)
    job.join(A, commit=6)
    for _ in range(14):
        job.wait(1)
        job.beat(A, step=6, waiting="the barrier", stall_s=8.0)
        job.beat(late)
    assert signal.SIGKILL in job.sent.get(late, [])


@pytest.mark.parametrize("code", [-9, 1])
def test_newcomers_that_fail_again_and_again_are_given_up(code: int) -> None:
    """The others' steps in the meantime do not count for it:
    the pause grows, and the fifth crash is the last.
    """
    job = started()
    job.beat(A, B, step=5)
    job.exit(B)
    for i in range(20):
        job.join(A, commit=10 + i)
        late = [name for name in job.alive if name != A]
        if not late:
            job.wait(61)
            late = [name for name in job.alive if name != A]
        if not late:
            break
        job.join(*late)
        job.join(A, commit=10 + i)
        job.beat(A, step=12 + i)
        job.beat(*late, step=10 + i)  # its state is put back, and it takes no step of its own
        job.exit(*late, code=code)
    assert job.code is None and job.alive == [A]
    assert any("is given up: 5 crashes" in text for text in job.said)


def test_a_newcomer_that_prepares_for_long_is_left_alone_while_it_beats() -> None:
    """A download of an hour is no hang; a process silent for ten minutes is."""
    job = started()
    job.exit(B)
    late = job.alive[-1]
    for _ in range(100):
        job.wait(10)
        job.beat(late)
    assert late not in job.sent
    job.wait(601)
    assert job.sent[late] == [signal.SIGKILL]


def test_a_worker_that_starts_horovod_without_a_rank_has_the_job_passed_on() -> None:
    """All workers are ended, and no exit code is set: Horovod's own driver takes the job."""
    job = Simulated()
    job.unassigned()
    assert job.code is None and job.state_machine.job.over is not None
    assert set(job.sent) == {A, B}, "the workers have nothing to save"
    job.exit(A, B, code=-15)
    assert job.state_machine.finished


def test_a_signal_while_a_job_is_passed_on_ends_it() -> None:
    """Otherwise Horovod's driver would start a job that was asked to end."""
    job = Simulated()
    job.unassigned()
    job.signal(signal.SIGTERM)
    job.exit(A, B, code=-15)
    assert job.code == 128 + signal.SIGTERM


def test_a_job_that_has_ranks_is_not_passed_on() -> None:
    """Its workers are trainkit's, whatever one of them does beside."""
    job = started()
    job.unassigned()
    assert job.assignments() == [A, B] and job.state_machine.job.over is None


def test_events_at_once_share_their_consequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand workers that join cost one look at all, and heartbeats alone none."""
    looks: list[float] = []

    def counted(job: Job, now: float) -> list[Decision]:
        looks.append(now)
        return settle(job, now)

    job = Simulated({"node1": 8}, np=2)
    monkeypatch.setattr(state_machine, "settle", counted)
    with job.together():
        job.join(*job.alive)
    assert (len(looks), len(job.assignments())) == (1, 8)  # one by one, the first two would train
    with job.together():
        job.beat(*job.alive, step=3)
    assert len(looks) == 1
    assert job.state_machine.job.workers[job.alive[0]].step == 3
