"""`python -m trainkit export`: parsing of the command line, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.extensions.exporting import command as export


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "ckpt_path is missing; it must be best, last, or a checkpoint's folder."),
        (
            ["ckpt_pth=best"],
            (
                "'ckpt_pth' is no setting of export. Did you mean 'ckpt_path'? Use ckpt_path,"
                " run_dir, format,"
            ),
        ),
        (["conf=mlp"], "'conf' is no setting of export."),
        (["--cfg"], "'--cfg' is no setting of export."),
        (
            ["ckpt_path"],
            "ckpt_path has no value; write ckpt_path=VALUE: best, last, or a checkpoint's folder.",
        ),
        (["ckpt_path=best", "run_dir="], "run_dir has no value"),
        (["ckpt_path=best", "ckpt_path=last"], "ckpt_path is given twice, as best and last."),
        (
            ["ckpt_path=best", "format=tflite"],
            "format is 'tflite'; it must be one of safetensors, huggingface, peft, torch_export, onnx.",
        ),
        (
            ["ckpt_path=best", "format=onnx", "output=a.pt2"],
            "output is 'a.pt2'; for format=onnx its name must end in .onnx.",
        ),
        (
            ["ckpt_path=best", "output=no/a.safetensors"],
            "output is 'no/a.safetensors', and the folder no does not exist.",
        ),
        (["ckpt_path=best", "run_dir=absent"], "run_dir is 'absent', which does not exist."),
    ],
)
def test_a_mistake_in_the_command_is_named(
    arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake ends with exit code 2 and one sentence, and nothing is written."""
    before = sorted(here.iterdir())
    assert export.main("export", arguments) == 2
    assert capsys.readouterr().err.startswith(f"Error: {words}")
    assert sorted(here.iterdir()) == before


def test_trust_is_read_as_a_list() -> None:
    """trust=a, trust=[a,b] and trust=['a', "b"] are lists of modules."""
    for text, modules in {
        "a.b": ["a.b"],
        "[a,b]": ["a", "b"],
        "['a', \"b\"]": ["a", "b"],
        "[]": [],
    }.items():
        assert export._read(["ckpt_path=last", f"trust={text}"])["trust"] == modules


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists the settings, and ends with exit code 0."""
    assert export.main("export", ["--help"]) == 0
    out = capsys.readouterr().out
    assert all(
        f"\n  {key}=" in out for key in ("ckpt_path", "run_dir", "format", "output", "trust")
    )
