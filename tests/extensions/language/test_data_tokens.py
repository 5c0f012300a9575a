"""`data tokens`: what may be asked for, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.tokenizers import TEXT, train_tokenizer
from trainkit.extensions.data import command as data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text(TEXT * 9, encoding="utf-8")
    return tmp_path


def test_a_text_becomes_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are printed, and the command that trains on them."""
    train_tokenizer(here / "tokenizer.json")
    assert (
        data.main(
            "data", ["tokens", "my.txt", "output=mine", "tokenizer=tokenizer.json", "val=0.2"]
        )
        == 0
    )
    about, out = json.loads((here / "mine/tokens.json").read_text()), capsys.readouterr().out
    assert (
        f"wrote    mine: {about['train_tokens']:,} tokens to train on, {about['val_tokens']:,}"
        " held out" in out
    )
    assert f"fit conf=gpt_124m data.root=mine data.vocab_size={about['vocab_size']}" in out
    assert about["val_tokens"] == pytest.approx(about["train_tokens"] / 4, abs=4)


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ([], 2, "The texts are missing"),
        (["output=x"], 2, "The texts are missing"),
        (["my.txt"], 2, "output is missing"),
        (["my.txt", "output=x", "val=1"], 2, "val is '1'; it must be a number between 0 and 1"),
        (["my.txt", "output=x", "val=some"], 2, "val is 'some'"),
        (["my.txt", "output=x", "tokeniser=y"], 2, "Did you mean 'tokenizer'?"),
        (
            ["my.txt", "output=x", "tokenizer=y.json"],
            2,
            "tokenizer is 'y.json', and there is no such file",
        ),
        (["my.txt", "output=x", "end_of_text=</s>"], 2, "bytes have no such token"),
        (["my.txt", "output=."], 2, "output is '.', which exists"),
        (["nowhere", "output=x"], 1, "nowhere does not exist"),
        (["empty", "output=x"], 1, "empty has no such file; give a .txt"),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str], code: int, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one sentence and the exit code; nothing is written."""
    (here / "empty").mkdir()
    assert data.main("data", ["tokens", *typed]) == code
    assert said in capsys.readouterr().err
    assert not (here / "x").exists()
