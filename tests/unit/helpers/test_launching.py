"""Commands of tests: one that hangs is ended, and the failure says what it was doing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.launching import BIN, run_command

PY_SPY = pytest.mark.skipif(
    not shutil.which("py-spy", path=str(BIN)), reason="py-spy is not installed"
)


@PY_SPY
@pytest.mark.parametrize("start", ["python wait.py", "python -m trainkit fit conf=wait"])
def test_a_command_that_hangs_shows_its_stack(start: str, tmp_path: Path) -> None:
    """Started by a shell, and as a fork of a process that has imported torch."""
    wait = "import time\n\n\ndef hang_here(*_, **__):\n    time.sleep(600)\n\n\n"
    (tmp_path / "wait.py").write_text(f"{wait}if __name__ == '__main__':\n    hang_here()\n")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "wait.yaml").write_text(
        "defaults: [_base, _self_]\ntask: {_target_: wait.hang_here}\ntrainer: {max_epochs: 1}\n"
    )
    with pytest.raises(
        pytest.fail.Exception, match=r"did not end within 8 s:[\s\S]*hang_here \(wait\.py:5\)"
    ):
        run_command(start, tmp_path, timeout_s=8)
