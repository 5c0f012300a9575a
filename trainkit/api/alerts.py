"""What an operator should hear of: printed, and kept in the run's folder for `trainkit status`.

A line of JSON for each alert, in a file for each rank, `logs/alerts-rank<N>.jsonl`: {"unix_s",
"step", "rank", "kind", "text"}.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from trainkit.console import warning

if TYPE_CHECKING:
    from trainkit.api.view import RunView

FILES = "alerts-rank*.jsonl"  # in logs/


def alert(run: RunView, kind: str, text: str) -> None:
    """Print an alert of all ranks on rank 0, and keep it there."""
    if run.is_global_zero:
        warning(text)
        keep_alert(run, kind, text)


def keep_alert(run: RunView, kind: str, text: str) -> None:
    """Keep an alert of this rank. A disk that cannot be written loses it; a folder that this host
    does not see is not made.

    Args:
        run: names folder, rank and step.
        kind: a word, as "straggler".
        text: for the user, printed already.
    """
    if run.options.fast_dev_run or not run.run_dir.is_dir():
        return
    line = {
        "unix_s": time.time(),
        "step": run.global_step,
        "rank": run.global_rank,
        "kind": kind,
        "text": text,
    }
    with contextlib.suppress(OSError):
        (run.run_dir / "logs").mkdir(exist_ok=True)
        with (run.run_dir / "logs" / f"alerts-rank{run.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
