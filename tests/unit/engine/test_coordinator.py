"""The coordinator: ranks agree seldom, at the same round, on signals and on rank 0's time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.threads import ThreadEngine, World
from trainkit.engine.coordinator import INTERVAL_S, Coordinator
from trainkit.engine.signals import Signals
from trainkit.engine.single import SingleEngine


class Clock:
    """A clock that the test moves, one for each thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._local = threading.local()
        monkeypatch.setattr("trainkit.engine.coordinator.time", SimpleNamespace(monotonic=self))

    def __call__(self) -> float:
        return getattr(self._local, "now", 0.0)

    def pass_(self, seconds: float) -> None:
        """Let time go by for this thread."""
        self._local.now = self() + seconds


class Counted:
    """An engine of several ranks that all act like this one;
    counts messages, and waits for them.
    """

    def __init__(self) -> None:
        self.ranks, self.comm = SimpleNamespace(world_size=2, is_main=True, is_elastic=False), self
        self.sent = self.read = 0

    def start_sum(self, number: int) -> Callable[[], int]:
        """No other rank reports anything."""
        assert self.sent == self.read, "one at a time"
        self.sent += 1

        def wait() -> int:
            self.read += 1
            return number

        return wait


def exchanges(
    clock: Clock, coordinator: Coordinator, engine: Counted, rounds: int, seconds: float
) -> list[int]:
    """Go through rounds that take so long each; return those in which something was sent."""
    sent = []
    for i in range(rounds):
        clock.pass_(seconds)
        before = engine.sent
        coordinator.count_round()
        if engine.sent > before:
            sent.append(i)
    return sent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that moves only by hand."""
    return Clock(monkeypatch)


@pytest.fixture
def engine() -> Counted:
    """An engine that counts."""
    return Counted()


def test_fast_rounds_send_seldom(clock: Clock, engine: Counted) -> None:
    """Over 10 s of rounds of 10 ms about two collectives a second are made,
    each a number of the host.
    """
    sent = exchanges(clock, Coordinator(engine, Signals()), engine, 1000, 0.01)  # type: ignore[arg-type]
    assert len(sent) <= 10 / INTERVAL_S + 8  # it starts with each round, and doubles the distance
    assert {b - a for a, b in zip(sent[-10:], sent[-9:], strict=False)} <= {49, 50, 51}


def test_slow_rounds_send_in_each(clock: Clock, engine: Counted) -> None:
    """If a round takes longer than the interval, every round has an exchange."""
    assert exchanges(clock, Coordinator(engine, Signals()), engine, 9, 2 * INTERVAL_S) == list(
        range(9)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "waits"), [(0.01, False), (0.3, False), (1.9, False), (2.1, True)]
)
def test_only_long_rounds_wait_for_an_exchange(
    clock: Clock, engine: Counted, seconds: float, waits: bool
) -> None:
    """Once the duration of a round is known, an exchange is read a round after it was sent;
    in long rounds at once.
    """
    coordinator = Coordinator(engine, Signals())  # type: ignore[arg-type]
    while engine.sent < 2:
        clock.pass_(seconds)
        coordinator.count_round()
        assert engine.read == engine.sent
    for _ in range(120):
        under_way = engine.sent - engine.read
        clock.pass_(seconds)
        sent, read = engine.sent, engine.read
        coordinator.count_round()
        assert engine.read == read + (under_way or (waits and engine.sent > sent))
    assert engine.sent > 5


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 7), (1.0, 2), (3.0, 1)])
def test_a_signal_is_noticed_soon(
    clock: Clock, engine: Counted, seconds: float, rounds: int
) -> None:
    """In short rounds within an interval and a round; in longer ones, a round after its own;
    in long ones, in it.
    """
    signals = Signals()
    coordinator = Coordinator(engine, signals)  # type: ignore[arg-type]
    exchanges(clock, coordinator, engine, 40, seconds)
    signals.received = "SIGTERM"
    taken, came = 0, False
    while not came and taken < 100:
        clock.pass_(seconds)
        came, taken = coordinator.count_round(), taken + 1
    assert taken <= rounds
    assert coordinator.num_signalled == 1


def test_a_signal_behind_the_beat_is_of_the_next_one(clock: Clock, engine: Counted) -> None:
    """A rank signalled while an exchange is in flight is not
    among those that the exchange reports.
    """
    signals = Signals()
    coordinator = Coordinator(engine, signals)  # type: ignore[arg-type]
    exchanges(clock, coordinator, engine, 3, 1.0)
    assert engine.sent > engine.read
    signals.received = "SIGTERM"
    seen = []
    for _ in range(2):
        clock.pass_(1.0)
        seen.append(
            (coordinator.count_round(), coordinator.num_signalled, coordinator.includes_this_rank)
        )
    assert seen == [(False, 0, False), (True, 1, True)]


def test_settle_reads_what_is_under_way(clock: Clock, engine: Counted) -> None:
    """At the end of a run, and when rounds change, no exchange stays in flight;
    its time is known then.
    """
    for end in (Coordinator.settle, Coordinator.expect_new_pace):
        coordinator = Coordinator(engine, Signals())  # type: ignore[arg-type]
        clock.pass_(100.0)
        exchanges(clock, coordinator, engine, 3, 1.0)
        assert (engine.sent - engine.read, coordinator.now) == (1, 102.0)
        end(coordinator)
        assert (engine.sent - engine.read, coordinator.now) == (0, 103.0)


def test_rounds_without_duration_are_counted_still(clock: Clock, engine: Counted) -> None:
    """However fast rounds are, an exchange comes after at most 255 of them."""
    sent = exchanges(clock, Coordinator(engine, Signals()), engine, 2000, 0.0)  # type: ignore[arg-type]
    assert max(b - a for a, b in zip(sent, sent[1:], strict=False)) == 255


def test_after_fast_rounds_slow_ones_are_found_out(clock: Clock, engine: Counted) -> None:
    """After rounds become slow, one interval passes; soon after that each round has an exchange."""
    coordinator = Coordinator(engine, Signals())  # type: ignore[arg-type]
    last = exchanges(clock, coordinator, engine, 500, 0.01)[-1]
    sent = exchanges(clock, coordinator, engine, 120, 1.0)
    assert 49 <= 500 + sent[0] - last <= 51  # the rounds of half a second that had been agreed on
    assert sent[1] - sent[0] <= 3  # half of the rounds that it goes by were fast ones
    assert sent[2:] == list(range(sent[1] + 1, 120))


def test_quicken_beats_in_the_next_round(clock: Clock, engine: Counted) -> None:
    """If the kind of rounds changes, as in validation, the next one has an exchange."""
    coordinator = Coordinator(engine, Signals())  # type: ignore[arg-type]
    exchanges(clock, coordinator, engine, 500, 0.01)
    coordinator.expect_new_pace()
    assert exchanges(clock, coordinator, engine, 8, 2.0) == list(range(8))


def test_one_rank_sends_nothing_and_knows_at_once(clock: Clock) -> None:
    """Alone, a signal is noticed in the round that it came in, and the time is this rank's."""
    signals = Signals()
    coordinator = Coordinator(SingleEngine("cpu"), signals)
    clock.pass_(3.0)
    assert not coordinator.count_round()
    assert coordinator.now == 3.0
    signals.received = "SIGTERM"
    assert coordinator.count_round()


def on_ranks(
    clock: Clock, rounds: int, signalled: dict[int, int], quickened: int | None = None
) -> list[list[Any]]:
    """Exchange on 3 ranks, the last one slow; return for each its (round, now, came) at each change
    of `now` or signal.

    Args:
        clock: gets other times on other ranks.
        rounds: at most.
        signalled: rank -> the round that its signal comes in.
        quickened: the round after which quicken is called.
    """

    def work(engine: ThreadEngine) -> list[Any]:
        with engine:
            signals = Signals()
            coordinator, seen, now = Coordinator(engine, signals), [], -1.0
            for i in range(rounds):
                clock.pass_(0.5 if engine.ranks.rank == 2 else 0.02)
                if signalled.get(engine.ranks.rank) == i:
                    signals.received = "SIGTERM"
                came = coordinator.count_round()
                if came or coordinator.now != now:
                    now = coordinator.now
                    seen.append((i, now, came))
                if came:
                    break
                if i == quickened:
                    coordinator.expect_new_pace()
            return seen

    return World(3).run(work)


def test_all_ranks_beat_at_the_same_round_and_read_rank_0s_clock(clock: Clock) -> None:
    """A rank with a clock 25 times as fast has the same exchanges,
    at the same time of rank 0's clock.
    """
    first, second, third = on_ranks(clock, 200, {})
    assert first == second == third
    # but for the first two, read a round later
    sent = [i if beat < 2 else i - 1 for beat, (i, _, _) in enumerate(first)]
    assert [now for _, now, _ in first] == pytest.approx([0.02 * (i + 1) for i in sent], abs=0.011)
    assert len(first) < 16


@pytest.mark.parametrize(
    "signalled", [{0: 40}, {1: 40}, {2: 40}, {1: 30, 2: 40}, {0: 31, 1: 35, 2: 40}]
)
def test_a_signal_is_noticed_by_all_at_the_same_round(
    clock: Clock, signalled: dict[int, int]
) -> None:
    """For any signalled ranks in any rounds,
    all ranks learn of it at the same exchange soon after.
    """
    first, second, third = on_ranks(clock, 200, signalled)
    assert first[-1] == second[-1] == third[-1]
    assert first[-1][2]
    assert min(signalled.values()) <= first[-1][0] < min(signalled.values()) + 26


def test_quickened_ranks_beat_together(clock: Clock) -> None:
    """After quicken the next round has an exchange on all ranks."""
    first, second, third = on_ranks(clock, 120, {}, quickened=100)
    assert first == second == third
    assert 101 in [i for i, _, _ in first]
