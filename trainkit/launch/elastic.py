"""The public place of the driver of elastic jobs: horovodrun asks for `run_elastic`, and
`python -m trainkit.launch.elastic` takes horovodrun's options.
"""

import sys
from typing import Any

from trainkit.extension import public


def __getattr__(name: str) -> Any:
    return public("trainkit.launch.elastic", name)


if __name__ == "__main__":
    sys.exit(__getattr__("main")())
