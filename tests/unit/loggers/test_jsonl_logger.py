"""metrics.jsonl: an object per line, readable by strict parsers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import JSONLLogger


class Odd(Line):
    """Logs numbers that JSON does not have, and a name with quotes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log one of them in each step."""
        self.log('an "odd" name', [1.5, math.nan, math.inf, -math.inf][self.global_step])
        return super().training_step(batch, batch_idx)


def refuse(text: str) -> None:
    """Fail if a parser meets NaN or Infinity."""
    raise AssertionError(f"{text} is not JSON")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the file's lines, read strictly."""
    content = (folder / "metrics.jsonl").read_text()
    assert content.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in content.splitlines()]


def train(
    folder: Path, ckpt_path: str | None = None, task: Line | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """Train epochs of two steps and return the lines."""
    known: dict[str, Any] = {
        "logger": JSONLLogger(),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    quiet(folder, **known | settings).fit(task or Line(), loader(8), loader(4), ckpt_path=ckpt_path)
    return lines_of(folder)


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines without the parts that differ from run to run."""
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_each_report_is_a_line(tmp_path: Path) -> None:
    """With its step, its epoch, its time and its values."""
    lines = train(tmp_path, max_epochs=2)
    assert [(line["step"], line["epoch"], sorted(line["values"])) for line in lines] == [
        (1, 0, ["lr", "train/loss"]),
        (2, 0, ["lr", "train/loss"]),
        (2, 0, ["val/loss"]),
        (3, 1, ["lr", "train/loss"]),
        (4, 1, ["lr", "train/loss"]),
        (4, 1, ["val/loss"]),
    ]
    assert lines[0]["values"]["lr"] == 0.1
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert times[0] > 1.7e9
    assert not any("nonfinite" in line for line in lines)


def test_numbers_that_json_has_not_are_null_and_named(tmp_path: Path) -> None:
    """NaN and infinity are null for a parser, and named in another field."""
    lines = train(tmp_path, max_epochs=2, task=Odd())
    odd = [line for line in lines if 'an "odd" name' in line["values"]]
    assert [line["values"]['an "odd" name'] for line in odd] == [1.5, None, None, None]
    assert [line.get("nonfinite", {}).get('an "odd" name') for line in odd] == [
        None,
        "nan",
        "inf",
        "-inf",
    ]
    assert all(line["values"]["lr"] == 0.1 for line in odd)


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    """Resuming from the last checkpoint gives the lines of an uninterrupted run;
    earlier lines stay unchanged.
    """
    first = train(tmp_path / "parts", max_epochs=2, enable_checkpointing=True)
    parts = train(tmp_path / "parts", max_epochs=3, ckpt_path="last")
    assert parts[: len(first)] == first
    assert without_time(parts) == without_time(train(tmp_path / "whole", max_epochs=3))


def test_what_is_trained_again_is_written_again(tmp_path: Path) -> None:
    """Resuming from an older checkpoint drops the lines after it."""
    train(tmp_path, max_epochs=3, callbacks=ModelCheckpoint(save_top_k=-1))
    lines = train(
        tmp_path, max_epochs=2, ckpt_path=str(tmp_path / "checkpoints" / "epoch=0-step=2")
    )
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize(
    "rest",
    [
        '{"step": 2, "epo',
        '{"step": 1}',
        "abc\n",
        '{"epoch": 1}\n',
        "[1]\n",
        '{"step": "2"}\n',
        "\x00\x00",
        "\xff\n",
    ],
)
def test_a_torn_line_is_left_out(tmp_path: Path, rest: str) -> None:
    """A line torn by a crash does not keep a run from resuming."""
    train(tmp_path, max_epochs=1, enable_checkpointing=True)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(rest.encode("latin-1"))
    assert [line["step"] for line in train(tmp_path, max_epochs=2, ckpt_path="last")] == [
        1,
        2,
        2,
        3,
        4,
        4,
    ]


def test_a_failed_write_is_reported_and_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file cannot be made: the run ends well, without it."""
    (tmp_path / ".metrics.jsonl.draft").mkdir()
    quiet(tmp_path, logger=JSONLLogger()).fit(Line(), loader(8))
    assert capsys.readouterr().out.count("JSONLLogger failed while opening: IsADirectoryError") == 1
