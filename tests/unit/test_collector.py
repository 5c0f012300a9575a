"""Python's collector of cycles: it waits while a command starts, and works as usual in a fit."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import trainkit
from tests.helpers.toy import Line, loader, quiet
from trainkit import __main__ as program
from trainkit.api.view import RunView
from trainkit.collector import collect_as_usual, collect_rarely

MINE = 1234, 5, 6


@pytest.fixture(autouse=True)
def mine() -> Iterator[None]:
    """Thresholds that this process has chosen."""
    before = gc.get_threshold()
    gc.set_threshold(*MINE)
    yield
    collect_as_usual()
    gc.set_threshold(*before)


def test_a_command_starts_with_few_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """One follows a hundred thousand objects."""
    thresholds = []

    def work(arguments: Sequence[str]) -> int:
        thresholds.append(gc.get_threshold())
        return 0

    monkeypatch.setattr(program, "_main", work)
    monkeypatch.setattr(program, "hold_signals", lambda: None)
    assert program.main() == 0
    assert thresholds == [(100_000, *MINE[1:])]


class Seen(trainkit.Callback):
    """Notes the thresholds in which a fit trains."""

    def on_train_start(self, trainer: RunView, task: trainkit.Task) -> None:
        """See Callback."""
        self.threshold = gc.get_threshold()


@pytest.mark.parametrize("starts", [True, False], ids=["a command", "a script"])
def test_a_fit_has_the_process_own(starts: bool, tmp_path: Path) -> None:
    """Those before the command started, or that the script has set."""
    if starts:
        collect_rarely()
    seen = Seen()
    quiet(tmp_path, max_steps=1, callbacks=[seen]).fit(Line(), loader(8))
    assert seen.threshold == MINE
