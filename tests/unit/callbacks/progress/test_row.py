"""A row of progress: on a narrow terminal the bar and its count stay, and nothing wraps."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from trainkit.callbacks.progress.row import Row

VALUES = ["train/loss 1.886", "train/acc 0.25", "lr 0.03", "train/grad_norm 12.3"]


def drawn(row: Row, width: int) -> list[str]:
    """Return the row's lines on a terminal."""
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system="256").print(row)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (
            200,
            (
                "epoch 2/9  step {40} 300/450 1,234 samples/s 1:05 train/loss 1.886  train/acc 0.25"
                "  lr 0.03  train/grad_norm 12.3"
            ),
        ),
        (
            100,
            "epoch 2/9  step {18} 300/450 1,234 samples/s 1:05 train/loss 1.886  train/acc 0.25  …",
        ),
        (80, "epoch 2/9  step {14} 300/450 1,234 samples/s 1:05 train/loss 1.886  …"),
        (60, "epoch 2/9  step {14} 300/450 1,234 samples/s 1:05"),
        (45, "epoch 2/9  step {15} 300/450 1:05"),
        (40, "epoch 2/9  step {15} 300/450"),
        (30, "epoch 2… {12} 300/450"),
        (20, "{11} 300/450"),
    ],
)
def test_values_go_first_then_the_rate_then_the_name(width: int, expected: str) -> None:
    """Of each width the same row: the bar keeps twelve columns as
    long as there are as many beside the count.
    """
    (line,) = drawn(Row("epoch 2/9  step", 300, 450, "1,234 samples/s", 65, VALUES), width)
    assert re.sub("[━╸╺]+", lambda bar: f"{{{len(bar[0])}}}", line.rstrip()) == expected


@given(
    st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=30),
    st.integers(0, 10**7),
    st.none() | st.integers(1, 10**7),
    st.lists(st.sampled_from([*VALUES, "损失 0.25"]), max_size=5),
    st.none() | st.floats(0, 1e6),
    st.integers(30, 200),
)
def test_a_row_is_one_line(
    name: str, done: int, total: int | None, values: list[str], left_s: float | None, width: int
) -> None:
    """No name, count, value or width makes the row wrap, nor fill the last column."""
    (line,) = drawn(Row(name, done, total, "1,234 samples/s", left_s, values), width)
    assert cell_len(line) < width
