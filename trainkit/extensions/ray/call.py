"""A worker of an elastic RayExecutor, `python -m trainkit.extensions.ray.call`: calls the function
that its keeper left for it.

The folder TRAINKIT_CALL holds the pickled call; how it ended goes there too: the rank at the end,
the value, or the error.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ray import cloudpickle

from trainkit.errors import EngineError, JobEnded
from trainkit.extensions.ray.sent import sendable
from trainkit.safety.tracebacks import text_of


def main() -> int:
    """Call it; return the exit code."""
    folder = Path(os.environ["TRAINKIT_CALL"])
    fn, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
    end: dict[str, Any] = {"is_done": False, "value": None, "error": None}
    code = 0
    try:
        end["value"] = fn(*args, **kwargs)
        end["is_done"] = True
    except SystemExit as ended:  # Preempted: 75, Dismissed: 0
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except JobEnded as ended:  # by another rank's error
        code = ended.exit_code
    except Exception as error:
        print(text_of(error), file=sys.stderr)
        end["error"] = sendable(error)
        code = getattr(error, "exit_code", 1)
    _write(
        folder / "result",
        end | {"rank": int(os.environ.get("HOROVOD_RANK", "0")), "at": time.time()},
    )
    return code


def _write(path: Path, end: dict[str, Any]) -> None:
    try:
        content = cloudpickle.dumps(end)
    except Exception as error:  # pickle's errors have no common type
        what = f"The value of rank {end['rank']}'s function cannot be sent to the driver: {error!r}"
        content = cloudpickle.dumps(
            end | {"value": None, "is_done": False, "error": EngineError(what)}
        )
    path.write_bytes(content)


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if ended:
        # not sys.exit: the frameworks' own exit handlers would wait for the other ranks
        os._exit(ended)
