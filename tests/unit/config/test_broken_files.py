"""Config files that cannot be read: one message, with file, line and column."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.config.compose import ComposedJob, run
from trainkit.errors import ConfigError, TaskError
from trainkit.run.lock import LOCK, is_held

START = b"defaults:\n  - mlp\n  - _self_\n"


# Nine aliases of nine aliases ...: 387 million values.
BOMB = b"a0: &a0 x\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 10)
)
BROKEN = [
    (START + b"trainer: {max_epochs: 1\n", "mine.yaml, line 5, column 1: "),
    (
        START + b"seed: 1\nseed: 2\n",
        "mine.yaml, line 5, column 1: while constructing a mapping found duplicate key seed",
    ),
    (START + b"# caf\xe9\nseed: 1\n", "mine.yaml, line 4, column 6: byte 0xe9 is not UTF-8"),
    (START + b"seed: \x01\n", "mine.yaml cannot be read: "),
    (
        START + b"a: {b: [!!int abc]}\n",
        "mine.yaml, line 4, column 9: a.b.0 is 'abc' with the tag !!int; it must be a whole",
    ),
    (
        START + b"a: !!bool maybe\n",
        "line 4, column 4: a is 'maybe' with the tag !!bool; it must be true or false",
    ),
    (
        START + b"a: !!timestamp soon\n",
        "column 4: a is 'soon' with the tag !!timestamp; it must be a date, as 2026-01-31",
    ),
    (START + b"a: &x {b: *x}\n", "mine.yaml, line 4, column 4: a.b stands for itself"),
    (START + b"on: 1\n", "mine.yaml, line 4, column 1: the key on is no name of a setting"),
    (
        START + b"a: " + b"[" * 900,
        "mine.yaml, line 4, column 103: values are nested more than 100 levels deep",
    ),
    *(
        (
            f"defaults: {value}\nseed: 1\n".encode(),
            f"mine.yaml, line 1, column 11: defaults is {value}; it must be a list",
        )
        for value in (
            "5",
            "null",
            "mlp",
            "[true]",
            "[{optimizer: 5}]",
            "[{optimizer: {a: 1}}]",
            "[mlp, {a: b, c: d}]",
        )
    ),
    (
        START + BOMB,
        "mine.yaml stands for more than 100000 values once its aliases (*name) are copied",
    ),
]
CIRCLE = (
    START.replace(b"mlp", b"mine") + b"seed: 1\n",
    "mine.yaml, or a config in its defaults list, includes itself",
    False,
)


@pytest.mark.parametrize(
    ("content", "words", "in_group"),
    [*((*one, place) for one in BROKEN for place in (False, True)), CIRCLE],
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
        ("'=x': 5", "has the key '=x'; it must be GROUP=NAME"),
    ],
)
def test_odd_keys_and_values_are_refused(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are no texts, and a value in place of several objects."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_bytes(START + text.encode())
    with pytest.raises(ConfigError) as caught:
        run("fit", ["conf=mine"], True, lambda job: None)
    assert words in str(caught.value)


def test_aliases_tags_and_dates_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OmegaConf reads them: a date without a tag is text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    own = b"vars: {a: &a {n: !!int '7', day: 2026-02-30}, b: *a, 3: [null, 1.5]}\n"
    (tmp_path / "conf" / "mine.yaml").write_bytes(START + own)
    seen: list[ComposedJob] = []
    run("fit", ["conf=mine"], True, seen.append)
    assert seen[0].config["vars"] == {
        "a": {"n": 7, "day": "2026-02-30"},
        "b": {"n": 7, "day": "2026-02-30"},
        3: [None, 1.5],
    }


def test_the_config_of_a_run_is_checked_too(tmp_path: Path) -> None:
    """A run may be another's, and its files anything."""
    (tmp_path / "config.yaml").write_bytes(b"a: 1\n" + BOMB)
    (tmp_path / "overrides.yaml").write_bytes(BOMB)
    with pytest.raises(ConfigError, match="stands for more than 100000 values"):
        run("validate", [f"run_dir={tmp_path}"], True, lambda job: None)


@pytest.mark.parametrize("line", ["callbacks={}", "logger=[[]]", "logger=[csv,{a:1}]"])
def test_a_group_takes_names_alone(line: str) -> None:
    """Hydra would end with an error of its code, or do nothing."""
    key, _, value = line.partition("=")
    with pytest.raises(
        ConfigError, match=f"{key} is {re.escape(value)}, and {key} names a config: "
    ):
        run("fit", ["conf=mlp", line], True, lambda job: None)


def test_a_profiler_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    """A mapping is no name."""
    with pytest.raises(
        ConfigError,
        match="trainer.profiler is {'a': 1}; it must be one of simple, advanced, pytorch",
    ):
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
