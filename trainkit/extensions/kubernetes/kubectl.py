"""kubectl, which creates the objects of a fit, and says what became of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from trainkit.errors import ConfigError

_TIMEOUT_S = 120.0


def run_kubectl(arguments: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run kubectl with a text as its input.

    Raises:
        ConfigError: it is not installed, or the cluster does not answer.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "There is no kubectl on this machine. Install it, with a context of the cluster;"
            " launcher=kubernetes launcher.dry_run=true prints the manifest without it."
        )
    try:
        return subprocess.run(
            ["kubectl", *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"kubectl did not answer within {_TIMEOUT_S:g} s: the cluster cannot be reached."
        ) from None


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return kubectl's own message, on one line."""
    return (
        "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        or f"exit code {done.returncode}"
    )
