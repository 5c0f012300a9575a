"""Analysis of a recording: parts, waiting, gradients, the slowest rank;
from recordings with known times.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.recordings import ABOUT, PARTS, record
from trainkit.extensions.timeline.report.advice import advise
from trainkit.extensions.timeline.report.recorded_facts import LABELS, StepOfRank
from trainkit.extensions.timeline.report.steps import Analysis, analyse, find_slow_rank
from trainkit.extensions.timeline.report.text import in_words, parts_grid
from trainkit.extensions.timeline.traces.clocks import Alignment
from trainkit.extensions.timeline.traces.merge import RankTrace, TraceError, read_recording
from trainkit.extensions.timeline.traces.pieces import OWN

GRADIENTS = {"layer.weight": 4_000_000, "layer.bias": 4_000}


def seen(folder: Path) -> Analysis:
    """Analyse a recording."""
    return analyse(read_recording(folder))


def ms(analysis: Analysis, part: str) -> float:
    """Return a part's mean milliseconds."""
    return round(1000 * analysis.median(part), 3)


def test_parts_are_those_that_were_recorded(tmp_path: Path) -> None:
    """The parts cover the whole step, each once."""
    analysis = seen(record(tmp_path, ranks=2))
    assert {part: ms(analysis, part) for part in PARTS} == PARTS
    assert ms(analysis, "waiting") == 0.0
    assert analysis.step_s == pytest.approx(sum(PARTS.values()) / 1000)
    assert analysis.samples_per_s == pytest.approx(32 / 0.040)
    assert analysis.numbers == [0, 1, 2, 3, 4, 5]


def test_waiting_for_a_slow_rank_is_not_communication(tmp_path: Path) -> None:
    """The fast rank waits; the reductions take both ranks the same time."""
    slow = PARTS | {"backward": 35.0}
    analysis = seen(
        record(tmp_path, ranks=2, parts_of=lambda rank, step: slow if rank == 1 else PARTS)
    )
    own = {rank: [s.seconds for s in analysis.steps if s.rank == rank][0] for rank in (0, 1)}
    assert own[0]["waiting"] == pytest.approx(0.015) and own[1]["waiting"] == pytest.approx(0.0)
    assert own[0]["communication"] == pytest.approx(0.004) == own[1]["communication"]


@pytest.mark.parametrize(("part", "more"), [("data", 12.0), ("forward", 9.0), ("backward", 9.0)])
def test_the_slowest_rank_is_named_with_step_and_reason(
    tmp_path: Path, part: str, more: float
) -> None:
    """From step 4 on rank 2 is the last, with the right reason;
    a single exception does not hide it.
    """

    def parts_of(rank: int, step: int) -> dict[str, float]:
        return PARTS | ({part: PARTS[part] + more} if rank == 2 and step >= 4 and step != 9 else {})

    slow = seen(record(tmp_path, ranks=3, steps=14, parts_of=parts_of)).slow
    assert slow is not None
    assert (slow.rank, slow.host, slow.since, slow.steps, slow.part) == (
        2,
        "node2",
        4,
        (9, 10),
        part,
    )
    assert slow.behind_s == pytest.approx(0.9 * more / 1000)
    assert slow.part_s == pytest.approx(
        (PARTS[part] + 0.9 * more) / 1000
    ) and slow.usual_s == pytest.approx(PARTS[part] / 1000)


def test_a_lapse_before_it_is_not_where_slowness_begins(tmp_path: Path) -> None:
    """A rank that was late by some milliseconds in a step or two, and by far more from step 5 on,
    is slow since step 5.
    """

    def parts_of(rank: int, step: int) -> dict[str, float]:
        more = {2: 6.0, 4: 9.0}.get(step, 150.0 if step >= 5 else 0.0)
        return PARTS | {"forward": PARTS["forward"] + more * (rank == 1)}

    slow = seen(record(tmp_path, ranks=2, steps=12, parts_of=parts_of)).slow
    assert slow is not None and (slow.rank, slow.since) == (1, 5)


def test_chance_names_no_rank() -> None:
    """Of recordings of ten steps that vary by chance alone, hardly any has a slowest rank."""
    draw, named = random.Random(0), 0
    for _ in range(300):
        steps = []
        for number in range(10):
            for rank in range(2):
                end = 200_000.0 * number + 1000 * draw.gauss(100, 5)
                steps.append(
                    StepOfRank(
                        number, rank, 0.0, dict.fromkeys(LABELS, 0.01), end - 50_000, end, 32
                    )
                )
        named += (
            find_slow_rank(steps, [RankTrace(replace(ABOUT, rank=rank), []) for rank in range(2)])
            is not None
        )
    assert named <= 6


def test_what_comes_once_an_epoch_is_no_part_of_a_step(tmp_path: Path) -> None:
    """A checkpoint at an epoch's end is not a part of each step."""
    folder = record(tmp_path)
    path = folder / OWN.format(0)
    path.write_text(path.read_text().replace('"name":"hooks"', '"name":"epoch end"', 1))
    assert sum(step.seconds["hooks"] for step in seen(folder).steps) == pytest.approx(
        0.002 * 5, abs=1e-6
    )


def test_ranks_that_take_turns_are_not_slow(tmp_path: Path) -> None:
    """Each is the last in every other step."""
    slow = PARTS | {"backward": 40.0}
    analysis = seen(
        record(
            tmp_path,
            ranks=2,
            steps=10,
            parts_of=lambda rank, step: slow if step % 2 == rank else PARTS,
        )
    )
    assert analysis.slow is None


def test_a_slow_rank_on_another_host_is_found_by_aligned_clocks(tmp_path: Path) -> None:
    """Its clock shows ten seconds less: unaligned it would seem the fastest."""
    slow = PARTS | {"forward": 30.0}
    folder = record(
        tmp_path,
        ranks=2,
        parts_of=lambda rank, step: slow if rank == 1 else PARTS,
        skews_ms={1: -10_000.0},
    )
    analysis = seen(folder)
    assert analysis.slow is not None and analysis.slow.rank == 1
    assert ms(analysis, "waiting") == pytest.approx(10.0, abs=0.2)  # twenty on one of two


def test_clocks_that_cannot_be_compared_accuse_no_rank(tmp_path: Path) -> None:
    """By the time of day a rank would seem eight milliseconds late in each step,
    and others to wait for it.
    """
    folder = record(
        tmp_path, ranks=2, steps=8, skews_ms={1: 0.0}, about=replace(ABOUT, unix_ns=10**18)
    )
    for rank in (0, 1):
        text = (folder / OWN.format(rank)).read_text()
        text = (
            text.replace('"unix_ns": 1000000000000000000', '"unix_ns": 1000000000008000000')
            if rank
            else text
        )
        (folder / OWN.format(rank)).write_text(
            "\n".join(line for line in text.splitlines() if '"meetings"' not in line)
        )
    analysis = seen(folder)
    assert analysis.unaligned == [1] and analysis.slow is None and ms(analysis, "waiting") == 0.0
    assert ms(analysis, "communication") == 4.0
    text = " ".join(in_words(analysis))
    assert (
        "cannot be determined: the ranks' clocks could not be compared" in text
        and "The clocks of ranks 1 could not" in text
    )


def test_lateness_within_the_error_of_the_clocks_is_none(tmp_path: Path) -> None:
    """A rank that is late by less than the clocks' error is not named."""
    late = PARTS | {"backward": 24.0}
    parts_of = lambda rank, step: late if rank == 1 else PARTS  # noqa: E731
    ranks = read_recording(record(tmp_path, ranks=2, steps=8, parts_of=parts_of, skews_ms={1: 5.0}))
    assert analyse(ranks).slow is not None
    ranks[1].clock = Alignment(
        *(replace(o, error_ns=3e6) for o in (ranks[1].clock.start, ranks[1].clock.end))
    )
    assert analyse(ranks).slow is None


def test_the_way_of_a_gradient_is_shown(tmp_path: Path) -> None:
    """Until all ranks have it, until Horovod takes it, copies, the collective."""
    late = PARTS | {"forward": 16.0}
    folder = record(
        tmp_path,
        ranks=2,
        gradients=GRADIENTS,
        parts_of=lambda rank, step: late if rank == 1 else PARTS,
    )
    analysis = seen(folder)
    weight = next(g for g in analysis.gradients if g.name == "layer.weight")
    assert weight.num_bytes == 4_000_000 and weight.fused_with == 2
    assert weight.negotiation_s == pytest.approx(0.003)  # six on one rank, none on the other
    # ready in the middle of backward, taken at its end
    assert weight.queue_s == pytest.approx(0.010)
    assert weight.fusion_s == pytest.approx(0.0008) and weight.allreduce_s == pytest.approx(0.0032)
    assert analysis.gradients == sorted(analysis.gradients, key=lambda g: -g.total_s)


def test_a_step_as_the_model_sees_it(tmp_path: Path) -> None:
    """When gradients are ready on all ranks, from the start of backward; and the rest of a step."""
    analysis = seen(record(tmp_path, ranks=2, gradients=GRADIENTS))
    profile, *_ = analysis.profiles
    assert profile.backward_s == pytest.approx(0.020) and profile.other_s == pytest.approx(0.016)
    assert [(round(at, 4), size) for at, size in profile.ready] == [(0.010, 4e6), (0.020, 4e3)]
    assert len(analysis.profiles) == 6


def test_on_a_gpu_the_device_says_how_long(tmp_path: Path) -> None:
    """Spans by the device's clock replace those of the host, which runs ahead."""
    folder = record(tmp_path, steps=2)
    path = folder / OWN.format(0)
    lines = path.read_text().splitlines()
    by_device = [
        line.replace('"tid":0', '"tid":1').replace('"dur":20000.0', '"dur":70000.0')
        for line in lines
        if '"cat":"part"' in line and "samples" not in line
    ]
    path.write_text(
        "\n".join(
            [
                *lines[:-2],
                *(line.rstrip(",") + "," for line in by_device),
                lines[-2].rstrip(","),
                "]",
            ]
        )
    )
    assert ms(seen(folder), "backward") == 70.0


def test_steps_that_a_rank_did_not_end_are_left_out(tmp_path: Path) -> None:
    """A killed rank has fewer steps; only steps of all ranks are compared."""
    folder = record(tmp_path, ranks=2, steps=6)
    path = folder / OWN.format(1)
    text = path.read_text()
    path.write_text(text[: text.index('"name":"data"', text.index('"step 3"'))])
    assert seen(folder).numbers == [0, 1, 2, 3]
    path.write_text(text[: text.index('"step 0"')])
    with pytest.raises(TraceError, match="no step that all ranks finished"):
        seen(folder)


def test_one_rank_waits_for_no_other(tmp_path: Path) -> None:
    """And reduces nothing."""
    alone = seen(record(tmp_path, about=replace(ABOUT, engine="single", cycle_ms=0.0)))
    assert (
        alone.slow is None
        and alone.link is None
        and alone.gradients == []
        and ms(alone, "waiting") == 0
    )
    assert set(LABELS) == set(alone.steps[0].seconds)


def test_one_long_step_moves_no_figure_and_is_named(tmp_path: Path) -> None:
    """One of 20 steps waits 830 ms for a rank's data: figures are those without it;
    a sentence names step, rank and part.
    """
    held_up = PARTS | {"data": 830.0}
    own = record(
        tmp_path / "a",
        ranks=2,
        steps=20,
        parts_of=lambda rank, step: held_up if (rank, step) == (1, 7) else PARTS,
    )
    analysis, plain = seen(own), seen(record(tmp_path / "b", ranks=2, steps=20))
    assert (analysis.step_s, analysis.samples_per_s) == pytest.approx(
        (plain.step_s, plain.samples_per_s)
    )
    assert {part: ms(analysis, part) for part in LABELS} == {
        part: ms(plain, part) for part in LABELS
    }
    (outlier,) = analysis.outliers
    assert (outlier.step, outlier.rank, outlier.part) == (7, 1, "data")
    said = in_words(analysis)
    assert said[0].endswith("40 ms a step, 800 samples/s; all figures are medians over the steps.")
    assert (
        said[1]
        == "Step 7 took 869 ms, 22 times the median: rank 1 waits for its loader for 830 ms."
    )
    assert plain.outliers == [] and len(in_words(plain)) == len(said) - 1
    assert [row[:3] for row in parts_grid(analysis).rows] == [
        row[:3] for row in parts_grid(plain).rows
    ]


def test_stalls_that_come_back_are_summed_and_advised_on(tmp_path: Path) -> None:
    """A loader that stalls each fifth step has a median wait of nearly nothing:
    sentence and advice count its stalls.
    """
    stalled = PARTS | {"data": 201.0}
    analysis = seen(
        record(tmp_path, steps=20, parts_of=lambda rank, step: stalled if step % 5 == 0 else PARTS)
    )
    assert in_words(analysis)[1].startswith(
        "4 of 20 steps took more than 3 times the median, and 60.0 % of the time; the longest"
    )
    (advice,) = [
        advice for advice in advise(analysis) if advice.setting.startswith("data.num_workers")
    ]
    assert "a step waits 41 ms for the loader" in advice.why
    assert advice.gain == pytest.approx(80 / 39 - 1)
