"""Config files that cannot be read: one message, with file, line and column."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.config.compose import run
from trainkit.config.of_run import read_config
from trainkit.errors import ConfigError, TaskError
from trainkit.run.lock import LOCK, is_held

START = b"defaults:\n  - mlp\n  - _self_\n"


BROKEN = [
    (START + b"trainer: {max_epochs: 1\n", "mine.yaml, line 5, column 1: "),
    (START + b"seed: 1\nseed: 2\n", "mine.yaml, line 5, column 1: while constructing a mapping found duplicate key seed"),
    (START + b"# caf\xe9\nseed: 1\n", "mine.yaml, line 4, column 6: byte 0xe9 is not UTF-8"),
    (START + b"seed: \x01\n", "mine.yaml cannot be read: unacceptable character #x0001"),
    (START + b"a:\n  b: [1, !!int abc]\n", "line 5, column 10: a.b.1 is '!!int abc'; it must be a whole number"),
    (START + b"a: !!bool maybe\n", "line 4, column 4: a is '!!bool maybe'; it must be true or false"),
    (START + b"a: !!timestamp soon\n", "line 4, column 4: a is '!!timestamp soon'; it must be a date"),
    (START + b"a: &a [*a]\n", "mine.yaml, line 4, column 4: a.0 stands for itself"),
    (START + b"a: " + b"[" * 2000 + b"]" * 2000, "mine.yaml cannot be read: its values are nested too deeply"),
    *(
        (f"defaults: {value}\nseed: 1\n".encode(), f"mine.yaml, line 1, column 11: defaults is {value!r}; it must be a list")
        for value in ("5", "null", "mlp", "[true]", "[{optimizer: 5}]", "[{optimizer: {a: 1}}]", "[{a: b, c: d}]")
    ),
]
LEVELS = ["defaults: [mlp, _self_]", "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
BOMB = [*LEVELS, *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]
BROKEN.append(("\n".join(BOMB).encode(), "mine.yaml stands for more than 100000 values once its aliases (*name) are copied"))
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("callbacks: 5", "callbacks is 5; it must be a mapping"),
        ("data: {1: 2}", "data.1 is not a setting"),
        ("true: 5", "True is not a setting"),
        ("=: 5", "has the key '='; it must be GROUP=NAME"),
    ],
)
def test_odd_keys_and_values_are_refused(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are no texts, and a value in place of several objects."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_bytes(START + text.encode())
    with pytest.raises(ConfigError) as caught:
        run("fit", ["conf=mine"], True, lambda job: None)
    assert words in str(caught.value)


def test_aliases_are_read(tmp_path: Path) -> None:
    """A few of them, one as the base of another mapping."""
    (tmp_path / "a.yaml").write_text("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}\n")
    assert read_config(tmp_path / "a.yaml") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


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
