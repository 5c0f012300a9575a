"""Arguments of commands: a run's folder in both of its forms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.__main__ import main
from trainkit.cli.options import read_keys, with_plain_run
from trainkit.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["run_dir=r", "port=1"], ["r", "port=1"]),
        (["port=1", "run_dir=r"], ["r", "port=1"]),
        (["logs", "run_dir=r", "lines=2"], ["logs", "r", "lines=2"]),
        (["r", "run_dir="], ["r", "run_dir="]),
    ],
)
def test_a_runs_folder_may_be_named(typed: list[str], read: list[str]) -> None:
    """run_dir=FOLDER is FOLDER, wherever it is typed;
    an empty one is left for the command to refuse.
    """
    assert with_plain_run(typed) == read


def test_a_bare_folder_is_answered_with_run_dir(tmp_path: Path) -> None:
    """As export's, which takes the folder by name; a word that is none gets no such answer."""
    keys = {"run_dir": "a folder", "ckpt_path": "a checkpoint"}
    with pytest.raises(ConfigError, match=f"Did you mean run_dir={tmp_path}"):
        read_keys([str(tmp_path)], keys, "export")
    with pytest.raises(ConfigError, match="^'best' is no setting of export. Use run_dir"):
        read_keys(["best"], keys, "export")


@pytest.mark.parametrize("command", ["serve", "generate", "show", "status", "timeline"])
def test_commands_of_a_run_take_run_dir(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As validate and export do: what is refused is the folder, not the form."""
    asked = ["run_dir=nowhere", *(["prompt=x"] if command == "generate" else [])]
    monkeypatch.setattr(sys, "argv", ["trainkit", command, *asked])
    monkeypatch.setattr("trainkit.__main__.hold_signals", lambda: None)
    assert main() != 0
    text = capsys.readouterr().err
    assert "nowhere" in text and "run_dir=" not in text
