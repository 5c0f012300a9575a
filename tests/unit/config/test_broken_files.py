"""Config files that cannot be read: one message, with file, line and column."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.config.compose import run
from trainkit.errors import ConfigError, TaskError
from trainkit.run.lock import LOCK, is_held

START = b"defaults:\n  - mlp\n  - _self_\n"


BROKEN = [
    (START + b"trainer: {max_epochs: 1\n", "mine.yaml, line 5, column 1: "),
    (START + b"seed: 1\nseed: 2\n", "mine.yaml, line 5, column 1: while constructing a mapping found duplicate key seed"),
    (START + b"# caf\xe9\nseed: 1\n", "mine.yaml, line 4, column 6: byte 0xe9 is not UTF-8"),
]
CIRCLE = (START.replace(b"mlp", b"mine") + b"seed: 1\n", "mine.yaml, or a config in its defaults list, includes itself", False)


@pytest.mark.parametrize(
    ("content", "words", "in_group"), [*((*one, place) for one in BROKEN for place in (False, True)), CIRCLE]
)
def test_the_place_of_the_fault_is_named(
    content: bytes, words: str, in_group: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a config, and of a group's file that only Hydra reads."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "conf" / "task" if in_group else tmp_path / "conf"
    place.mkdir(parents=True)
    (place / "mine.yaml").write_bytes(content)
    line = ["conf=mlp", "task=mine"] if in_group else ["conf=mine"]
    with pytest.raises(ConfigError) as caught:
        run("fit", line, True, lambda job: None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profiler_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    """A mapping is no name."""
    with pytest.raises(ConfigError, match="trainer.profiler is {'a': 1}; it must be one of simple, advanced, pytorch"):
        quiet(tmp_path, profiler={"a": 1})


@pytest.mark.parametrize("value", [{1: 2}, 5, [1, 2], None])
def test_odd_hyperparameters_are_refused(value: object) -> None:
    """Keys that are no texts, and values that are no mapping."""

    class Odd(Line):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(value)

    with pytest.raises(TaskError, match="cannot be saved; give a mapping"):
        Odd()


def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """Without waiting for its writer."""
    os.mkfifo(tmp_path / LOCK)
    assert not is_held(tmp_path)
    with pytest.raises(ConfigError, match="is no plain file"):
        quiet(tmp_path).fit(Line(), loader(8))
