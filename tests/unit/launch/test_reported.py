"""An error that all ranks of a host have is printed once, however far apart they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from trainkit.errors import ConfigError
from trainkit.launch import reported
from trainkit.launch.environment import Launcher
from trainkit.launch.reported import is_first, report_uncaught_once


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for the notes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "1")
    return tmp_path


def test_the_first_rank_of_a_job_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text in the same job is printed once; another text, or another job's, is printed."""
    assert [is_first("a"), is_first("a"), is_first("b")] == [True, False, True]
    monkeypatch.setenv("MASTER_PORT", "2")
    assert is_first("a")


def test_a_later_job_at_the_same_address_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes are dropped after a minute, also if the clock was set back by an hour."""
    for now in (10_000.0, 10_061.0, 6_400.0):
        monkeypatch.setattr(reported.time, "time", lambda now=now: now)
        assert is_first("a")
    assert not is_first("a")


def test_torchrun_started_once_more_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a port of the user's own its variables are the same, but for the folder of its logs."""
    starts = ("none_a/attempt_0", "none_b/attempt_0")
    for start in starts:
        said = []
        for rank in range(2):
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{start}/{rank}/error.json")
            said.append(is_first("a"))
        assert said == [True, False]


def test_notes_that_cannot_be_read_cost_nothing(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Garbage is dropped, and a link of another user is not followed."""
    assert is_first("a")
    (notes,) = place.iterdir()
    notes.write_bytes(b"x\n\n1 2 3\n" + b"9" * 99)
    assert is_first("a")
    other = tmp_path_factory.mktemp("other") / "file"
    notes.unlink()
    notes.symlink_to(other)
    assert is_first("a")
    assert not other.exists()


def test_ranks_at_the_same_time() -> None:
    """One of many prints."""
    with ThreadPool(8) as pool:
        assert sum(pool.map(is_first, ["a"] * 64)) == 1


def ends_with(error: Exception, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a script on a rank of two with an error, as Python does."""
    monkeypatch.setenv("HOROVOD_RANK", str(rank))
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_uncaught_once()
    try:
        raise error.with_traceback(None)
    except Exception as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(ConfigError("key is 1."), False), (KeyError("mine"), True)]
)
def test_an_error_of_a_script_is_printed_by_one_rank(
    error: Exception,
    has_traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The sentence of a trainkit error with the script's own line; of another one the traceback."""
    waits: list[float] = []
    monkeypatch.setattr(reported.time, "sleep", waits.append)
    ends_with(error, 0, monkeypatch)
    first = capsys.readouterr().err
    ends_with(error, 1, monkeypatch)
    assert capsys.readouterr().err == "" and waits == [2.0]
    assert first.startswith("Error on rank 0: ") and "raise error" in first
    assert ("Traceback" in first) == has_traceback


def test_lines_of_an_error_fit_the_launchers_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's name counts as well; without such a terminal the error is one line."""
    launcher = Launcher("horovodrun", 0, 2, 0, 2)
    monkeypatch.setattr(reported, "columns_of_launcher", lambda: 30)
    reported.print_once("one two three " * 9, launcher, is_prose=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 30
    assert lines[0].startswith("Error on rank 0: one two")
    monkeypatch.setattr(reported, "columns_of_launcher", lambda: None)
    reported.print_once("one two three " * 8, launcher, is_prose=True)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("full", [False, True])
def test_a_script_of_one_process_ends_as_a_command(
    full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of trainkit is a sentence and the script's line; TRAINKIT_TRACEBACK=full shows the
    frames.
    """
    monkeypatch.setenv("TRAINKIT_TRACEBACK", "full" * full)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_uncaught_once()
    for error in (ConfigError("key is 1."), KeyError("mine")):
        try:
            raise error
        except Exception as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)
    sentence, _, rest = capsys.readouterr().err.partition("Traceback" if full else "\n")
    assert sentence == ("" if full else "Error: key is 1.")
    assert "raise error" in rest and rest.endswith("KeyError: 'mine'\n")


def test_the_line_shown_is_the_scripts_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of a module of Python's own or of a package that the error passed."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_uncaught_once()
    in_library = compile("raise ConfigError('key is 1.')", contextlib.__file__, "exec")
    try:
        exec(in_library, {"ConfigError": ConfigError})
    except ConfigError as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    assert capsys.readouterr().err.splitlines()[1].startswith(__file__)


def test_a_hook_of_the_script_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of ranks."""
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setattr(sys, "excepthook", print)
    report_uncaught_once()
    assert sys.excepthook is print


def test_a_refusal_of_the_constructor_is_one_too(place: Path) -> None:
    """A script under a launcher that imports the Trainer has the hook before it calls anything."""
    (place / "mine.py").write_text("from trainkit import Trainer\n\nTrainer(max_epoch=1)\n")
    launched = {**os.environ, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "TMPDIR": str(place)}
    line = [sys.executable, str(place / "mine.py")]
    done = subprocess.run(line, env=launched, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("Error on rank 0: trainer.max_epoch is not a setting.")
    assert done.stderr.rstrip().endswith("mine.py, line 3: Trainer(max_epoch=1)")
