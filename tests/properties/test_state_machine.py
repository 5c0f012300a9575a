"""The elastic driver under random events:
its promises hold after each, and every job ends (helpers/simulated_job.py).
"""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.simulated_job import Simulated

HOSTS: list[dict[str, int]] = [{"a": 2}, {"a": 2, "b": 1}, {"b": 1}, {"b": 2, "a": 1}, {}, {"c": 3}]
EVENTS = [
    "join",
    "join",
    "join",
    "answer",
    "beat",
    "crash",
    "lost",
    "75",
    "0",
    "error",
    "wait",
    "doze",
    "hosts",
    "term",
    "stale",
    "together",
]

often = settings(deadline=None, max_examples=400)
sequences = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60)
shapes = st.tuples(
    st.integers(1, 3),
    st.integers(0, 2),
    st.none() | st.integers(0, 2),
    st.none() | st.integers(0, 3),
)


def play(
    shape: tuple[int, int, int | None, int | None], sequence: list[tuple[str, int]]
) -> Simulated:
    """Let events happen to a job, those that can."""
    min_np, more, spare, resets = shape
    np = min_np + more
    most = None if spare is None else np + spare
    job = Simulated(
        HOSTS[1],
        np=np,
        min_np=min_np,
        max_np=most,
        reset_limit=resets,
        timeout_s=20.0,
        start_s=40.0,
    )
    step = 0
    events = iter(sequence)
    for event, number in events:
        if event == "together":
            with job.together():
                for one, own in itertools.islice(events, number):
                    step = happen(job, one, own, step)
        else:
            step = happen(job, event, number, step)
    return job


def happen(job: Simulated, event: str, number: int, step: int) -> int:
    """Let an event happen; return the step that workers report."""
    if event == "hosts":
        job.hosts(HOSTS[number])
    elif event == "term":
        if number == 0:
            job.signal()
    elif event in ("wait", "doze"):
        if not job.is_together:
            job.wait(number) if event == "wait" else job.sleep(number * 100)
    elif job.alive and event != "together":
        name = job.alive[number % len(job.alive)]
        if event == "join":
            job.join(name, commit=step)
        elif event == "stale":
            job.join(
                name,
                commit=step - number,
                generation=max(0, job.state_machine.job.generation - number),
            )
        elif event == "answer":
            job.state_machine.answer(name)
        elif event == "beat":
            step += number
            job.beat(name, step=step, waiting="grads" if number % 2 else "", stall_s=5.0)
        else:
            job.exit(name, code={"crash": -9, "lost": None, "75": 75, "0": 0, "error": 4}[event])
    return step


@often
@given(shapes, sequences)
def test_rules_hold_and_obedient_workers_bring_the_job_to_its_end(
    shape: tuple[int, int, int | None, int | None], sequence: list[tuple[str, int]]
) -> None:
    """From any state, workers that join on request,
    work a while and end bring the job to an end.
    """
    job = play(shape, sequence)
    for turn in range(200):
        if job.state_machine.finished:
            break
        for name in list(job.alive):
            worker = job.state_machine.job.workers.get(name)
            if worker is None:
                continue
            answer = job.state_machine.answer(name) or {"answer": "wait"}
            if job.sent.get(name):
                job.exit(name, code=-job.sent[name][-1])
            elif worker.phase != "starting" and answer["answer"] in ("leave", "end"):
                job.exit(name, code=0 if answer["answer"] == "leave" else 1)
            elif worker.phase == "starting" or (worker.phase == "running" and job.wanted(name)):
                job.join(name, commit=turn)
            elif worker.phase == "running" and turn > 20:
                job.exit(name, code=0)
            else:
                job.beat(name, step=1000 + turn, stall_s=5.0)
        job.wait(1)
    assert job.state_machine.finished, (
        f"still open: {job.state_machine.job.workers}, {job.said[-3:]}"
    )


@often
@given(shapes, sequences)
# the time is up in the event that fills a slot
@example((2, 2, None, None), [("wait", 5), ("hosts", 3)])
def test_workers_that_all_crash_bring_the_job_to_its_end(
    shape: tuple[int, int, int | None, int | None], sequence: list[tuple[str, int]]
) -> None:
    """A job in which every process dies again and again ends too, with an error."""
    job = play(shape, sequence)
    for _ in range(400):
        if job.state_machine.finished:
            break
        if job.alive:
            job.exit(job.alive[0])
        job.wait(1)
    assert job.state_machine.finished, (
        f"still open: {job.state_machine.job.workers}, {job.said[-3:]}"
    )


@often
@given(shapes, sequences)
# a host comes back once the job is over
@example((1, 0, None, None), [("hosts", 2), ("0", 0), ("hosts", 0)])
def test_workers_that_do_nothing_any_more_bring_the_job_to_its_end(
    shape: tuple[int, int, int | None, int | None], sequence: list[tuple[str, int]]
) -> None:
    """Silent processes that only SIGKILL ends do not block a job indefinitely,
    once they have reported their stall_s.
    """
    job = play(shape, sequence)
    for name in list(job.alive):
        job.beat(name, stall_s=5.0)
    for _ in range(900):
        if job.state_machine.finished:
            break
        for name in list(job.alive):
            if 9 in job.sent.get(name, []):
                job.exit(name)
        job.wait(1)
    assert job.state_machine.finished, (
        f"still open: {job.state_machine.job.workers}, {job.said[-3:]}"
    )
