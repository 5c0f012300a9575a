"""Stragglers: the slow rank is named, with the cause, from each rank's own clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.late_device import late_device
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader
from trainkit.callbacks import FaultInjection, Stragglers
from trainkit.callbacks.step_clock import PARTS, StepClock, Times
from trainkit.errors import ConfigError
from trainkit.extensions.insight.stragglers import Straggler, find_stragglers
from trainkit.trainer import Trainer


def parts(**seconds: float) -> dict[str, float]:
    """Return a rank's seconds."""
    return {
        "data": 0.01,
        "compute": 0.1,
        "communication": 0.02,
        "optimizer": 0.01,
        "hooks": 0.0,
    } | seconds


def find(*ranks: dict[str, float], factor: float = 1.25) -> list[Straggler]:
    """Return the stragglers among these ranks."""
    return find_stragglers([(f"node{i}", rank) for i, rank in enumerate(ranks)], factor)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("data", "waits for data"),
        ("compute", "computes"),
        ("hooks", "is in callbacks between steps"),
    ],
)
def test_the_slow_rank_is_named_with_its_reason(part: str, words: str) -> None:
    """The part with the largest difference from the median rank is named."""
    (straggler,) = find(parts(), parts(), parts(**{part: 0.3}), parts())
    assert (straggler.rank, straggler.host, straggler.part, straggler.seconds) == (
        2,
        "node2",
        part,
        0.3,
    )
    assert f"rank 2 (node2) {words} for 300 ms" in str(straggler)


def test_of_two_ranks_the_slower_one_is_it() -> None:
    """Of two ranks the slower one is found, though there is no middle one."""
    (straggler,) = find(parts(), parts(compute=0.2))
    assert straggler.rank == 1 and straggler.behind == pytest.approx(0.1)


def test_waiting_for_others_is_not_being_slow() -> None:
    """A fast rank spends the difference in communication."""
    assert find(parts(communication=0.5), parts(communication=0.5), parts()) == []


def test_small_differences_are_not_reported() -> None:
    """No rank is reported below the factor, or below two milliseconds a step."""
    assert find(parts(), parts(compute=0.12)) == []
    tiny = dict.fromkeys(PARTS, 0.0001)
    assert find(tiny, tiny | {"compute": 0.001}) == []


def test_shares_of_samples_are_named() -> None:
    """A rank with more samples computes longer:
    the message says so, and how to split them otherwise.
    """
    ranks = [("node0", parts(compute=0.3)), ("node1", parts())]
    (straggler,) = find_stragglers(ranks, 1.25, "3:1")
    assert "Samples are split 3:1." in str(straggler) and "callbacks=balance" in str(straggler)
    assert "split 3:1" not in str(find_stragglers(ranks, 1.25)[0])


def test_the_slowest_comes_first() -> None:
    """Several ranks may be slow."""
    assert [
        s.rank for s in find(parts(), parts(data=0.3), parts(), parts(compute=0.5), parts())
    ] == [3, 1]


def play(clock: Any, *calls: str) -> None:
    """Call the clock's hooks."""
    for call in calls:
        if call == "begin":
            clock.on_train_step_start(None, None)
        elif call == "batch_came":
            clock.on_train_batch_start(None, None, None, 0)
        elif call == "batch_done":
            clock.on_after_backward(None, SimpleNamespace(automatic_optimization=True))
        elif call == "sums_came":
            clock.on_before_optimizer_step(None, None, None)
        elif call == "end":
            clock.on_train_step_end(None, None)
        elif call == "pause":
            clock.on_validation_start(None, None)
        else:
            clock.on_validation_end(None, None)


def test_the_clock_counts_each_part_where_it_ends() -> None:
    """Two microbatches in a step, then something between two steps,
    then a validation that does not count.
    """
    times = iter(
        [
            0.0,
            1.0,
            3.0,
            3.5,
            5.5,
            6.0,
            6.25,
            10.25,
            11.25,
            13.25,
            13.5,
            13.75,
            13.75,
            99.0,
            100.0,
            101.0,
        ]
    )
    clock = StepClock(now=lambda: next(times))
    play(clock, "begin", "batch_came", "batch_done", "batch_came", "batch_done", "sums_came", "end")
    play(
        clock,
        "begin",
        "batch_came",
        "batch_done",
        "sums_came",
        "end",
        "pause",
        "continue",
        "begin",
        "batch_came",
    )
    expected = {"data": 3.5, "compute": 6.0, "communication": 0.75, "optimizer": 0.5, "hooks": 4.0}
    assert clock.read() == Times(2, expected)
    assert clock.read().per_step() == {part: seconds / 2 for part, seconds in expected.items()}
    assert list(clock.durations) == [
        6.25,
        7.5,
    ], "a step begins where the one before it ended; a validation belongs to no rank"


def test_a_validation_within_a_step_is_no_part_of_it() -> None:
    """It runs before the step's end (trainer.val_check_interval), and counts for nothing."""
    times = iter([0.0, 1.0, 3.0, 3.5, 4.0, 54.0, 54.25, 55.0, 56.0])
    clock = StepClock(now=lambda: next(times))
    play(
        clock,
        "begin",
        "batch_came",
        "batch_done",
        "sums_came",
        "pause",
        "continue",
        "end",
        "begin",
        "batch_came",
    )
    expected = {"data": 2.0, "compute": 2.0, "communication": 0.5, "optimizer": 0.75, "hooks": 0.0}
    assert clock.read() == Times(1, expected)
    assert list(clock.durations) == [4.25]


class Event:
    """Replaces torch.Event: the device needs ten seconds
    for work that the host queues in one.
    """

    made, waited = 0, False

    def __init__(self, timed: bool) -> None:
        self.at, Event.made = 10.0 * Event.made, Event.made + 1

    def query(self) -> bool:
        """Return whether it has completed: the device is two events behind."""
        return Event.waited or self.at / 10 < Event.made - 2

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds."""
        return 1000 * (later.at - self.at)


def test_on_a_gpu_compute_is_what_the_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has run ahead, and then waited in the reduction:
    that is no communication. No step waits.
    """
    monkeypatch.setattr("trainkit.callbacks.step_clock.mark", Event)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: setattr(Event, "waited", True))
    times = iter([0.0, 1.0, 2.0, 13.0, 14.0] + [14.0, 15.0, 16.0, 27.0, 28.0])
    clock = StepClock(now=lambda: next(times))
    clock._on_gpu = True
    play(clock, *("begin", "batch_came", "batch_done", "sums_came", "end") * 2)
    assert not Event.waited
    assert clock.read().seconds == {
        "data": 2.0,
        "compute": 20.0,
        "communication": 4.0,
        "optimizer": 2.0,
        "hooks": 0.0,
    }
    assert Event.waited and clock.read() == clock.read()


@pytest.mark.parametrize(
    ("early_s", "data", "communication"),
    [
        pytest.param(8.0, 1.0, 2.0, id="the device computes meanwhile"),
        pytest.param(10.0, 2.0, 1.0, id="for a second the device has nothing to compute"),
    ],
)
def test_a_wait_for_the_next_batch_is_data_if_the_device_has_nothing_to_do(
    early_s: float, data: float, communication: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits 11 seconds before the sums are there; the device computes for 9 of them."""
    monkeypatch.setattr("trainkit.callbacks.step_clock.mark", Event)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: setattr(Event, "waited", True))
    times = iter([0.0, 1.0, 2.0, 13.0, 14.0])
    clock = StepClock(now=lambda: next(times))
    clock._on_gpu = True
    play(clock, "begin", "batch_came", "batch_done")
    clock._fetching.waited_ns += int(early_s * 1e9)
    play(clock, "sums_came", "end")
    assert clock.read().seconds == {
        "data": data,
        "compute": 10.0,
        "communication": communication,
        "optimizer": 1.0,
        "hooks": 0.0,
    }


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_the_clock_waits_for_a_device_only_where_it_is_read(seed: int | None) -> None:
    """Its events are around forward and backward, three pieces of work and the second event here;
    what comes between two steps is no part of them.
    """
    with late_device(seed) as device:
        clock = StepClock(now=itertools.count().__next__)
        clock._on_gpu = True
        total = torch.zeros(2, device=device)
        for _ in range(3):
            play(clock, "begin", "batch_came")
            total.add_(1).add_(1).add_(1)
            play(clock, "batch_done", "sums_came", "end")
            total.mul_(1)
        assert seed is not None or not torch.accelerator.current_stream().query()
        assert clock.read().steps == 3 and clock._device_s == pytest.approx(0.004 * 3)
        assert total.tolist() == [9.0, 9.0]


def test_a_slow_rank_is_found_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Two real Trainers, one of them slow: rank 0 reports it once."""

    def work(engine: ThreadEngine) -> list[Straggler]:
        watch = Stragglers(every_n_steps=2)
        slow = FaultInjection([{"do": "slow", "rank": 1, "step": 0, "seconds": 0.1}])
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options: dict[str, Any] = dict.fromkeys(quiet, False)
        Trainer(engine=engine, max_epochs=3, callbacks=[slow, watch], **options).fit(
            Line(), loader(16, 2), loader(4, 2)
        )
        return watch.found

    for found in World(2).run(work):
        assert [(s.rank, s.part) for s in found] == [(1, "compute")]
    assert capsys.readouterr().out.count("Straggler: rank 1") == 1


def test_a_factor_that_makes_every_rank_a_straggler_is_refused() -> None:
    """The factor must be above 1."""
    with pytest.raises(ConfigError, match=r"stragglers.factor is 0.5; it must be above 1"):
        Stragglers(factor=0.5)
