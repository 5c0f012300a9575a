"""What a command shows at its end."""

from __future__ import annotations

import pytest

from trainkit.cli.execute import _show_metrics


def test_a_path_is_shown_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    """It is there to be copied."""
    path = "runs/job/checkpoints/" + 9 * "epoch=3-step=158/"
    _show_metrics({"val/acc": 0.5}, path)
    assert path in capsys.readouterr().out
