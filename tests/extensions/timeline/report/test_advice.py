"""Advice follows from the numbers of a recording, each with its predicted gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.recordings import ABOUT, PARTS, record
from trainkit.extensions.timeline.report.advice import Advice, advise
from trainkit.extensions.timeline.report.overlap import Profile, ReductionCost, Summing
from trainkit.extensions.timeline.report.steps import Analysis, analyse
from trainkit.extensions.timeline.report.text import advice_grid, in_words, parts_grid
from trainkit.extensions.timeline.traces.merge import read_recording


def seen(folder: Path, **options: Any) -> Analysis:
    """Record and analyse."""
    return analyse(read_recording(record(folder, **options)))


def of(analysis: Analysis, start: str) -> Advice:
    """Return the advice with this start of its setting."""
    return next(advice for advice in advise(analysis) if advice.setting.startswith(start))


def test_a_run_without_faults_gets_no_advice(tmp_path: Path) -> None:
    """Nothing that would gain a hundredth."""
    good = PARTS | {"data": 0.1, "hooks": 0.1, "communication": 0.1}
    analysis = seen(tmp_path, ranks=2, parts_of=lambda rank, step: good)
    assert advise(analysis) == []
    assert advice_grid([]).rows == [("nothing", "", "no setting known here gains 1 %")]


@pytest.mark.parametrize(
    ("workers", "setting", "gain"),
    [(0, "data.num_workers=2 or more", 59 / 39 - 1), (4, "data.num_workers=8", 59 / 39 - 1)],
)
def test_waiting_for_data_asks_for_workers(
    tmp_path: Path, workers: int, setting: str, gain: float
) -> None:
    """The most that can be gained is all that is waited; twice the workers halve a step at best."""
    waits = PARTS | {"data": 20.0}
    analysis = seen(
        tmp_path, parts_of=lambda rank, step: waits, about=replace(ABOUT, workers=workers)
    )
    advice = of(analysis, "data.")
    assert advice.setting == setting and advice.is_bound and advice.gain == pytest.approx(gain)
    assert "20 ms" in advice.why


def test_twice_the_workers_halve_a_step_at_most(tmp_path: Path) -> None:
    """A step that is nearly all waiting stays bound by the loader."""
    waits = PARTS | {"data": 1000.0}
    analysis = seen(tmp_path, parts_of=lambda rank, step: waits, about=replace(ABOUT, workers=4))
    assert of(analysis, "data.").gain == pytest.approx(1.0)


def test_a_rank_that_computes_longest_gets_fewer_samples(tmp_path: Path) -> None:
    """The gain is that of equal times: of 30 and 60 ms for as many samples both compute 40 ms;
    for 1:3 of them, 48.
    """
    usual = PARTS | {"forward": 10.0, "backward": 20.0}
    slow = PARTS | {"forward": 20.0, "backward": 40.0}
    even = seen(tmp_path / "even", ranks=2, parts_of=lambda rank, step: slow if rank else usual)
    assert of(even, "callbacks=balance").gain == pytest.approx(
        even.step_s / (even.step_s - 0.020) - 1
    )
    about = replace(ABOUT, rank_shares="1:3")
    unequal = seen(
        tmp_path / "unequal",
        ranks=2,
        parts_of=lambda rank, step: slow if rank else usual,
        about=about,
    )
    assert of(unequal, "callbacks=balance").gain == pytest.approx(
        unequal.step_s / (unequal.step_s - 0.012) - 1
    )
    assert "Samples are split 1:3." in " ".join(in_words(unequal))
    waits = PARTS | {"data": 60.0}
    loading = seen(
        tmp_path / "loading", ranks=2, parts_of=lambda rank, step: waits if rank else usual
    )
    assert not any(advice.setting == "callbacks=balance" for advice in advise(loading))


def test_an_update_that_takes_long_gets_no_setting_that_is_on_already(tmp_path: Path) -> None:
    """Each fit has torch's fused update where the optimizer has one; others have no such argument."""
    slow = PARTS | {"optimizer": 40.0}
    about = replace(ABOUT, device="NVIDIA H100 80GB HBM3")
    analysis = seen(tmp_path, parts_of=lambda rank, step: slow, about=about)
    assert of(analysis, "fewer and larger parameters").is_bound
    assert not any("fused" in advice.setting for advice in advise(analysis))


def test_a_slow_rank_is_the_first_to_mend(tmp_path: Path) -> None:
    """The others' wait for it is the possible gain."""
    slow = PARTS | {"backward": 60.0}
    analysis = seen(tmp_path, ranks=2, parts_of=lambda rank, step: slow if rank else PARTS)
    first = advise(analysis)[0]
    assert first.setting == "make rank 1 on node1 as fast as the others"
    # the other one waits 40 of 80 ms
    assert first.gain == pytest.approx(80 / 40 - 1) and first.is_bound


def with_sums(
    analysis: Analysis,
    ready: tuple[tuple[float, float], ...],
    link: ReductionCost,
    summing: Summing,
) -> Analysis:
    """Return the analysis of steps with these gradients."""
    return replace(analysis, profiles=[Profile(ready, 0.020, 0.016)], link=link, summing=summing)


def test_a_long_cycle_is_shortened(tmp_path: Path) -> None:
    """Gradients wait for Horovod's next cycle, and the model predicts the gain of a shorter one."""
    waits = PARTS | {"communication": 10.0}
    analysis = seen(tmp_path, ranks=2, parts_of=lambda rank, step: waits)
    slow = with_sums(
        analysis,
        ((0.0201, 1e6),),
        ReductionCost(1e-4, 1e10),
        Summing(cycle_s=0.010, fusion_bytes=2**27),
    )
    advice = of(slow, "engine.cycle_time_ms")
    assert advice.setting == "engine.cycle_time_ms=0.1"
    # 2.4 to 9.9 ms, as looks happen to come
    assert advice.gain == pytest.approx(46 / (46 - 6.1) - 1, rel=0.05)


def test_many_small_sums_are_fused(tmp_path: Path) -> None:
    """Each has a latency: with threshold 0, forty tensors are forty reductions instead of one."""
    waits = PARTS | {"communication": 10.0}
    analysis = seen(tmp_path, ranks=2, parts_of=lambda rank, step: waits)
    ready = tuple((0.019, 1e4) for _ in range(40))
    many = with_sums(
        analysis, ready, ReductionCost(2.5e-4, 1e10), Summing(cycle_s=0.001, fusion_bytes=0.0)
    )
    assert of(many, "engine.fusion_threshold_mb").gain > 0.15


def test_a_slow_network_asks_for_fewer_bytes_and_fewer_sums(tmp_path: Path) -> None:
    """Compression and accumulation, as modelled; no compression if gradients are narrow already."""
    waits = PARTS | {"communication": 100.0}
    about = replace(ABOUT, cycle_ms=0.0)
    analysis = seen(tmp_path, ranks=2, parts_of=lambda rank, step: waits, about=about)
    slow = with_sums(analysis, ((0.0, 12e6),), ReductionCost(0.0, 1e8), Summing())
    assert of(slow, "engine.compression=fp16").gain == pytest.approx(136 / 76 - 1)
    assert of(slow, "trainer.accumulate_grad_batches=2").gain == pytest.approx(
        136 / (33 + 103 / 2) - 1
    )
    narrow = replace(slow, abouts=[replace(about, wire="fp16") for about in slow.abouts])
    assert not any("compression" in advice.setting for advice in advise(narrow))


def test_no_gain_is_promised_beyond_what_was_measured(tmp_path: Path) -> None:
    """Whatever the model predicts, exposed communication limits the gain for reductions."""
    analysis = seen(tmp_path, ranks=2)
    mad = with_sums(analysis, ((0.020, 1e9),), ReductionCost(1.0, 1e6), Summing(cycle_s=100.0))
    assert all(
        advice.gain <= 40 / 36 - 1 + 1e-9
        for advice in advise(mad)
        if advice.setting.startswith("engine.")
    )


def test_the_words_name_what_matters(tmp_path: Path) -> None:
    """Steps, speed, the largest part, the slowest rank; a rank with a missing file."""
    slow = PARTS | {"backward": 60.0}
    analysis = seen(tmp_path, ranks=2, parts_of=lambda rank, step: slow if rank else PARTS)
    text = " ".join(in_words(analysis))
    assert "Steps 0 to 5 on 2 ranks" in text and "Most of it is backward" in text
    assert "Rank 1 on node1 is the slowest since step 0: in 6 of 6 steps the last, by 40 ms" in text
    (tmp_path / "rank-1.json").unlink()
    assert "Of 2 ranks only the files of 0 are present" in " ".join(
        in_words(analyse(read_recording(tmp_path)))
    )


def test_stalls_in_changing_parts_are_not_laid_to_the_part_of_the_largest_median(
    tmp_path: Path,
) -> None:
    """If the medians add up to little of a step,
    the part with most of all time is named instead.
    """
    stalls = ("data", "data", "forward", "backward", "communication", "hooks")
    analysis = seen(
        tmp_path,
        parts_of=lambda rank, step: (
            dict.fromkeys(PARTS, 1.0) | {"optimizer": 3.0} | {stalls[step]: 100.0}
        ),
    )
    text = " ".join(in_words(analysis))
    assert "Most of it is" not in text
    assert "the parts' medians add up to 7.5 % of a step" in text
    assert "Of the time of all steps data wait has most (31.8 %)." in text


@pytest.mark.parametrize(
    ("engine", "gradients", "says"),
    [
        ("ddp", {}, "only Horovod records when each is reduced"),
        ("horovod", {}, "there is no record of Horovod's operations"),
        ("horovod", {"a": 4000, "b": 400}, "too similar in size to determine the network's cost"),
    ],
)
def test_what_cannot_be_said_is_said_why(
    tmp_path: Path, engine: str, gradients: dict[str, int], says: str
) -> None:
    """The cause is printed, and there is no prediction for reductions of unknown cost."""
    analysis = seen(tmp_path, ranks=2, about=replace(ABOUT, engine=engine), gradients=gradients)
    assert says in " ".join(in_words(analysis))
    assert not any("compression" in advice.setting for advice in advise(analysis))


def test_of_many_ranks_four_and_the_slowest_are_in_the_table(tmp_path: Path) -> None:
    """It stays readable."""
    slow = PARTS | {"data": 30.0}
    analysis = seen(
        tmp_path, ranks=12, steps=6, parts_of=lambda rank, step: slow if rank == 9 else PARTS
    )
    assert parts_grid(analysis).columns == (
        "part",
        "median",
        "share",
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 3",
        "rank 9",
    )
