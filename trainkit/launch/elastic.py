"""The public place of the driver of elastic jobs: horovodrun asks for `run_elastic`, and
`python -m trainkit.launch.elastic` takes horovodrun's options.

Without the extension that brings it, an elastic job is refused.
"""

import sys
from typing import Any

from trainkit.errors import ConfigError
from trainkit.extension import public, public_names

_PLACE = "trainkit.launch.elastic"  # also as __main__


def __getattr__(name: str) -> Any:
    if name in ("run_elastic", "main") and not public_names(_PLACE):
        return _refuse
    return public(_PLACE, name)


def _refuse(*_: Any) -> int:
    print(
        "[elastic] --min-np, --max-np or --host-discovery-script asks for an elastic job, and this"
        " copy of trainkit lacks the extension 'elastic', which drives it. Install all of trainkit"
        " (`python -m trainkit extensions` lists what is there), or leave these options out.",
        file=sys.stderr,
        flush=True,
    )
    return ConfigError.exit_code


if __name__ == "__main__":
    sys.exit(__getattr__("main")())
