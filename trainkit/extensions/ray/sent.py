"""Exceptions on their way from a rank to the driver:
what arrives is the exception, or says what it was.
"""

from __future__ import annotations

import os
import re

from ray import cloudpickle

from trainkit.errors import EngineError
from trainkit.safety.tracebacks import text_of

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def sendable(error: Exception) -> Exception:
    """Return a rank's exception if it can be pickled and unpickled,
    and else an EngineError with all that it says.
    """
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception as failed:  # pickle's errors have no common type
        kind = type(error)
        return EngineError(
            f"Rank {os.environ.get('HOROVOD_RANK', '0')} raised"
            f" {kind.__module__}.{kind.__qualname__}: {error}\n{text_of(error)}\nIt cannot be sent"
            f" to the driver itself ({type(failed).__name__}: {failed}): an exception is made again"
            " there as type(error)(*error.args), so give all arguments of its __init__ to"
            " super().__init__()."
        )
    return error


def without_colors(text: str) -> str:
    """Return a text without a terminal's codes for colours:
    Ray's errors have them, in files too.
    """
    return _COLORS.sub("", text)
