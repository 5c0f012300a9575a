"""A traceback of the user's code:
the user's own frames, and those of trainkit in front of them as a line.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.toy import Line, loader, quiet
from trainkit.cli.guard import guarded
from trainkit.errors import summary
from trainkit.launch.environment import read_launcher
from trainkit.safety.tracebacks import text_of


class Wrong(Line):
    """Fails in its step, two calls deep, because of another error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    def loss_of(self, batch: Any) -> Any:
        try:
            return batch["label"]
        except TypeError as error:
            raise KeyError("label") from error


@pytest.mark.parametrize(("shown", "has_all"), [("", False), ("full", True)])
def test_frames_of_trainkit_are_a_line(
    shown: str,
    has_all: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the user's, in which the error is; TRAINKIT_TRACEBACK=full shows all.
    The cause is there in both.
    """
    monkeypatch.setenv("TRAINKIT_TRACEBACK", shown)
    assert (
        guarded(lambda: quiet(tmp_path, max_epochs=1).fit(Wrong(), loader()), read_launcher()) == 1
    )
    text = capsys.readouterr().err
    for own in (
        "return self.loss_of(batch)",
        'raise KeyError("label") from error',
        "The above exception was the direct cause",
    ):
        assert own in text
    assert (
        text.endswith("KeyError: 'label'\n")
        and text.count("Traceback (most recent call last)") == 2
    )
    assert ("trainkit/loop.py" in text) == has_all
    assert (" frames of trainkit; TRAINKIT_TRACEBACK=full shows them)" in text) != has_all


def test_after_the_users_last_frame_all_are_shown() -> None:
    """The error is there: here in trainkit, which a script calls with what only Python refuses."""
    try:
        text_of(3)  # type: ignore[arg-type]
    except AttributeError as error:
        text = text_of(error)
    assert (
        "traceback.TracebackException.from_exception(error)" in text
        and "frames of trainkit" not in text
    )


class Listed(Dataset):  # type: ignore[type-arg]
    """A data set that fails in a worker, two calls deep, because of another error."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        try:
            return [][index]
        except IndexError as error:
            raise RuntimeError("no sample here") from error


def test_an_error_of_a_worker_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then which sample it is, its frames in the user's files and those of its cause, without torch's;
    the status of the run has it as one line.
    """
    loading = DataLoader(Listed(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError) as raised:
        quiet(tmp_path, max_epochs=1).fit(Line(), loading)
    text = text_of(raised.value)
    assert text.startswith("RuntimeError: no sample here\nSample 0 of Listed raised this, with ")
    assert "\nIn DataLoader worker process 0 (TRAINKIT" in text
    assert "return [][index]" in text and "IndexError: list index out of range" in text
    assert text.endswith('raise RuntimeError("no sample here") from error')
    assert not {"worker.py", "fetch.py", "dataloader.py", "order.py"} & {
        *re.findall(r"\w+\.py", text)
    }
    assert summary(raised.value) == "RuntimeError: no sample here (in DataLoader worker process 0)"
    monkeypatch.setenv("TRAINKIT_TRACEBACK", "full")
    assert "fetch.py" in text_of(raised.value)


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("parts_of_mine", "It is src/parts_of_mine.py: set PYTHONPATH=src, or run"),
        ("package_of_mine.part", "It is src/package_of_mine/__init__.py: set PYTHONPATH=src"),
        ("nothing_at_all.part", "There is no module nothing_at_all in this folder"),
        ("trainkit.nothing", "trainkit/__init__.py, and has no trainkit.nothing"),
    ],
)
def test_a_module_that_is_missing_has_advice(
    module: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is, if a folder here has it; the frames of Python's import are folded."""
    (tmp_path / "src/package_of_mine").mkdir(parents=True)
    (tmp_path / "src/package_of_mine/__init__.py").touch()
    (tmp_path / "src/parts_of_mine.py").touch()
    (tmp_path / "script_of_mine.py").write_text(f"import {module}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("script_of_mine")
    text = text_of(raised.value)
    assert advice in text.splitlines()[-1]
    assert "<frozen" not in text and f"import {module}" in text


def test_torchs_calls_of_modules_are_left_out() -> None:
    """Two frames for each module say nothing; the module's own stay."""
    with pytest.raises(RuntimeError) as raised:
        nn.Sequential(nn.Linear(2, 2))(torch.zeros(1, 3))
    text = text_of(raised.value)
    assert "_call_impl" not in text and "input = module(input)" in text
