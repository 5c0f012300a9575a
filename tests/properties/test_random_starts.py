"""A run that is killed at random moments, and resumed by other engines and ranks,
is the run that was not: weights and logs.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.launching import Done, run_command
from tests.properties.workers.random_start import DEATH, Start
from trainkit.checkpoint.weights import read_weights

SCRIPT = Path(__file__).parent / "workers" / "random_start.py"
LAST_STEP = 12  # of three epochs of four steps; nine if updates are by hand
PLAIN = Start(
    engine="single", ranks=1, accumulate=1, workers=0, kind="map", ema=True, every=2, dies=None
)


def launch(start: Start, run_dir: Path) -> Done:
    """Run one start under its engine's launcher."""
    python = {"single": "python", "horovod": f"horovodrun -np {start.ranks} python"}
    launcher = python.get(start.engine, f"torchrun --nproc-per-node {start.ranks}")
    words = shlex.quote(json.dumps(dataclasses.asdict(start)))
    return run_command(f"{launcher} {SCRIPT} {run_dir} {words}", run_dir.parent, 300)


def rows(run_dir: Path) -> list[dict[str, float]]:
    """Return metrics.csv without speeds."""
    with (run_dir / "metrics.csv").open() as file:
        return [
            {name: float(text) for name, text in row.items() if text and "samples" not in name}
            for row in csv.DictReader(file)
        ]


@st.composite
def starts(draw: Any) -> list[Start]:
    """Draw a run: what all its starts share, and how each of those that are killed trains."""
    kind = draw(st.sampled_from(["map", "map", "stream", "manual"]))
    ema = draw(st.booleans())
    every = draw(st.integers(1, 3))
    sequence = []
    for _ in range(draw(st.integers(1, 3))):
        ranks = draw(st.integers(1, 3))
        splits = ["fsdp"] * (kind != "manual")  # it refuses updates by hand
        engine = draw(
            st.sampled_from(
                ["horovod", "ddp", *splits] if ranks > 1 else ["single", "horovod", "ddp"]
            )
        )
        accumulate = 1 if kind == "manual" else draw(st.integers(1, 2))
        workers = 0 if kind == "stream" else draw(st.sampled_from([0, 0, 2]))
        dies = (draw(st.integers(0, ranks - 1)), draw(st.integers(1, LAST_STEP)))
        sequence.append(Start(engine, ranks, accumulate, workers, kind, ema, every, dies))
    return sequence


@settings(deadline=None, max_examples=6)
@given(starts())
@example([dataclasses.replace(PLAIN, engine="fsdp", ranks=3, accumulate=2, dies=(2, 5))])
@example([dataclasses.replace(PLAIN, engine="horovod", ranks=2, workers=2, dies=(0, 6)), PLAIN])
def test_a_run_of_many_starts_is_one_run(sequence: list[Start]) -> None:
    """Whatever engine, ranks, accumulation and workers each start had,
    and whichever rank was killed after which step.
    """
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place, "whole"), Path(place, "killed")
        # of one rank
        last = dataclasses.replace(
            PLAIN, kind=sequence[0].kind, ema=sequence[0].ema, every=sequence[0].every
        )
        done = launch(last, whole)
        assert done.code == 0, done.text
        for start in sequence:
            (Path(place) / DEATH).unlink(missing_ok=True)
            done = launch(start, killed)
            # it failed by the death alone
            assert (done.code != 0) == (Path(place) / DEATH).exists(), done.text
        done = launch(last, killed)
        assert done.code == 0, done.text
        own = read_weights(str(killed / "checkpoints" / "last"))
        for name, expected in read_weights(str(whole / "checkpoints" / "last")).items():
            torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-12)
        assert rows(killed) == [pytest.approx(row, abs=1e-9) for row in rows(whole)]
