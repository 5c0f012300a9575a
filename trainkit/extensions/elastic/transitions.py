"""Consequences of an elastic job's state and the time:
which workers end or start, when a generation forms, when it is over.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from trainkit.console import plural
from trainkit.extensions.elastic.client import RankAssignment
from trainkit.extensions.elastic.job import Job
from trainkit.extensions.elastic.messages import Decision, Say, Send, Start
from trainkit.extensions.elastic.replicas import complete, in_order, incomplete, mates
from trainkit.extensions.elastic.stalls import frozen, limit, stalled
from trainkit.extensions.elastic.workers import PREEMPTED, Slot, Worker

# Ticks come several times a second. A longer time between two events means that the driver did not
# run.
ASLEEP_S = 5.0


def settle(job: Job, now: float) -> list[Decision]:
    """Apply all transitions; return the decisions since the last call."""
    gap = now - job.now
    if gap > ASLEEP_S:
        for w in job.workers.values():
            w.shift(gap)
        gap = 0.0
    job.now = now
    for conclude in (_watch, _break_up, _dismiss, _form, _fill, _give_up):
        if job.over is None:
            conclude(job)
    if job.over is None and len(job.coming) < job.need and not job.alive("running"):
        _run_short(job, gap)
        if job.over is not None:
            _cancel_starts(job)
    _press(job)
    out = job.out
    job.out = []
    return out


def _watch(job: Job) -> None:
    """Find the workers that block the job."""
    if job.stop is not None:
        return
    for w in frozen(job.workers.values(), job.stall_s, job.now):
        job.kill(w, f"sent no heartbeat for {limit(w, job.stall_s):g} s (frozen?) and was killed")
    stall = stalled(job.workers.values(), job.stall_s, job.now)
    if stall is not None and not stall.culprits and job.is_broken:
        stall = None  # they wait for a lost rank, until its connection times out
    if stall is None:
        job.stall = None
    elif job.stall is None or job.stall[0].culprits != stall.culprits:
        job.stall = stall, job.now + job.rules.dump_s
        job.say(f"{stall.text}; all ranks write their stacks now")
        for w in job.alive("waiting", "running"):
            w.dump = "wanted"
    elif job.now >= job.stall[1] or not any(w.dump for w in job.alive("waiting", "running")):
        job.stall = None
        if not stall.culprits:
            job.end(1, f"all ranks wait for each other: {stall.text}")
        for name in stall.culprits:
            job.kill(job.workers[name], "blocked the others and was killed")


def _break_up(job: Job) -> None:
    """Make workers leave of which another one that held weights with them is gone, or is to leave:
    the replica comes back as a whole.
    """
    for w, why, is_gone in incomplete(job):
        w.unwanted = why
        if w.phase == "running" and is_gone and not job.is_ending:
            job.kill(w, "")  # it has no state that another could continue with
        elif w.phase == "running":
            w.term_at = job.now + job.rules.leave_s


def _dismiss(job: Job) -> None:
    """Make workers leave that are not wanted."""
    if job.done_at is not None:
        for w in job.alive("starting", "waiting"):
            if w.assignment is None:
                w.unwanted = "the other ranks are done"
                if w.phase == "starting":
                    job.kill(w, "")  # it has no state to save
        # A worker blocked on an exited worker never returns; one not blocked may still be writing
        # its final checkpoint.
        for w in [*job.alive("waiting"), *(w for w in job.alive("running") if w.waiting)]:
            still = job.now - max(w.moved, w.joined, job.done_at)
            if w.term_at is None and w.kill_at is None and still > job.rules.finish_s:
                w.unwanted = (
                    f"it waited for other ranks for {job.rules.finish_s:g} s after the first one"
                    " was done"
                )
                job.kill(w, "", signal.SIGTERM)
    for w in job.alive("waiting"):
        if w.unwanted:
            w.phase = "ending"
            w.term_at = job.now + job.rules.end_s


def _form(job: Job) -> None:
    """Form a generation if no worker runs and enough wait."""
    if job.generation and job.is_broken and not job.may_form:
        what = job.changes[-1][0] if job.changes else "the ranks joined again"
        most = job.rules.reset_limit if job.rules.max_failures is None else job.rules.max_failures
        job.end(
            1,
            f"{what}, and the {most} changes that {job.rules.words.reset_limit} allows are used up",
        )
        return
    waiting = [w for w in job.alive("waiting") if not job.is_ending or w.assignment is not None]
    if job.rules.replica_size > 1:
        waiting = complete(waiting, job.rules.replica_size)
    if len(waiting) < job.need or job.alive("running"):
        return
    fresh = job.generation > 0 and all(w.assignment is None for w in waiting)
    if (
        fresh
        and job.alive("starting")
        and job.now - min(w.joined for w in waiting) < job.rules.fresh_s
    ):
        return
    begins_at = max(0, *(w.commit for w in waiting))
    chosen = waiting if job.rules.replica_size > 1 else in_order(waiting)
    # beyond the most, late workers get none
    chosen = chosen[
        : int(min(len(chosen), job.rules.most)) // job.rules.replica_size * job.rules.replica_size
    ]
    assignments = _assign(chosen, job.generation + 1)
    for name, assignment in assignments.items():
        w = job.workers[name]
        w.replica = mates(name, list(assignments), job.rules.replica_size)
        w.phase = "running"
        w.assignment = assignment
        w.entered = begins_at
        w.moved = w.heard = job.now
    job.say(
        _formed(job, list(assignments.values()), [job.workers[name].host for name in assignments])
    )
    job.generation += 1
    job.members = set(assignments)
    job.main_code = None
    job.short_s = 0.0
    job.stall = None
    job.changes.clear()


def _assign(workers: Sequence[Worker], generation: int) -> dict[str, RankAssignment]:
    """Return the ranks of a generation by the workers' names; they are in the order of ranks."""
    by_host: dict[str, list[Worker]] = {}
    for worker in workers:
        by_host.setdefault(worker.host, []).append(worker)
    assignments = {}
    for rank, worker in enumerate(workers):
        on_host = by_host[worker.host]
        local_rank = on_host.index(worker)
        peers = [name for name, others in by_host.items() if len(others) > local_rank]
        assignments[worker.name] = RankAssignment(
            generation=generation,
            rank=rank,
            size=len(workers),
            local_rank=local_rank,
            local_size=len(on_host),
            cross_rank=peers.index(worker.host),
            cross_size=len(peers),
        )
    return assignments


def _formed(job: Job, assignments: list[RankAssignment], hosts: list[str]) -> str:
    counts = {host: hosts.count(host) for host in hosts}
    where = ", ".join(f"{host} ({n})" if len(counts) > 1 else host for host, n in counts.items())
    text = f"{plural(len(assignments), 'rank')} on {where}, generation {job.generation + 1}"
    if not job.generation or not job.changes:
        return text
    what = "; ".join(change for change, _ in job.changes)
    return f"{text}: {what}; formed {job.now - job.changes[0][1]:.2f} s later"


def _fill(job: Job) -> None:
    """Start processes in free slots, those with the fewest crashes first."""
    if job.is_ending or (job.generation and not job.may_form):
        return
    wanted = [w for w in job.workers.values() if w.phase != "ending" and not w.unwanted]
    room = job.rules.most - len(wanted)
    # of a host that is away, one worker shows whether it is back
    probed = {w.host for w in job.workers.values()}
    started = sum(slot.count for slot in job.slots.values())
    for host, n in _free(job):
        if room < 1:
            break
        slot = job.slots[host, n]
        if slot.given_up or slot.ready_at > job.now:
            continue
        away = job.away.get(host)
        if away is not None:
            if away.ready_at > job.now or host in probed:
                continue
            probed.add(host)
        room -= 1
        started += 1
        slot.count += 1
        slot.left = False
        w = Worker(f"{host}/{n}#{slot.count}", host, n, born=job.now)
        job.workers[w.name] = w
        job.out.append(Start(w.name, host, n, started - 1 if started <= job.rules.np else None))
        if slot.count > 1 and away is None:
            job.say(f"{w} is started")


def _free(job: Job) -> list[tuple[str, int]]:
    """Return the slots without a process, those with the fewest crashes first."""
    taken = {(w.host, w.slot) for w in job.workers.values()}
    free = []
    for host, slots in job.hosts.items():
        for n in range(slots):
            if (host, n) not in taken:
                job.slots.setdefault((host, n), Slot())
                free.append((host, n))
    return sorted(free, key=lambda key: job.slots[key].crashes)


def _cancel_starts(job: Job) -> None:
    """Drop the starts of this event: the job was declared over in the same one."""
    for start in [decision for decision in job.out if isinstance(decision, Start)]:
        w = job.workers.pop(start.worker)
        job.slots[w.host, w.slot].count -= 1
        job.out = [
            decision for decision in job.out if decision not in (start, Say(f"{w} is started"))
        ]


def _give_up(job: Job) -> None:
    """End the job if all workers have ended; kill a process that never joined."""
    for w in job.alive("starting"):
        # a process with heartbeats prepares its data
        if job.now - max(w.born, w.heard) > job.rules.start_s:
            job.kill(w, f"did not join within {job.rules.start_s:g} s of its start and was killed")
    if job.workers:
        return
    if job.stop is not None:
        wrong = [code for code in job.codes if code not in (0, PREEMPTED)]
        code = wrong[0] if wrong else max(job.codes, default=128 + job.stop)
        job.end(code, f"{job.stop.name} ended all workers")
    elif job.done_at is not None:
        job.end(
            job.main_code or 0,
            "rank 0 ended with an error after others were done" if job.main_code else "done",
        )
    elif job.preempted and not any(
        s.is_pending and n < job.hosts.get(host, 0) for (host, n), s in job.slots.items()
    ):
        job.end(
            PREEMPTED,
            "all workers were preempted; the same command resumes from the newest checkpoint",
        )


def _run_short(job: Job, gap: float) -> None:
    """Count the time with too few workers present or starting."""
    job.short_s += gap
    if job.is_ending or job.short_s <= job.rules.timeout_s:
        return
    there = len(job.coming)
    lost = [
        f"slot {n} of {host} {s}"
        for (host, n), s in job.slots.items()
        if n < job.hosts.get(host, 0) and str(s)
    ]
    hosts = ", ".join(f"{host}:{slots}" for host, slots in job.hosts.items()) or "none"
    words = job.rules.words
    option = words.min_np if job.generation else words.np
    text = (
        f"{plural(there, 'worker')} for {job.rules.timeout_s:g} s ({words.timeout}), and {job.need}"
        f" are needed ({option})"
    )
    job.end(
        1,
        f"{text}; hosts: {hosts}{''.join(f'; {one}' for one in lost)}. Start the job again when"
        " enough are available",
    )


def _press(job: Job) -> None:
    """Send signals to workers whose time is up."""
    for w in job.workers.values():
        if w.term_at is not None and job.now >= w.term_at:
            job.out.append(Send(w.name, signal.SIGTERM))
            w.term_at = None
            w.kill_at = job.now + job.rules.term_s
        elif w.kill_at is not None and job.now >= w.kill_at:
            job.out.append(Send(w.name, signal.SIGKILL))
            w.kill_at = job.now + job.rules.term_s  # again, in case a new child was missed
