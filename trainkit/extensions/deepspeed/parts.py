"""`python -m trainkit.extensions.deepspeed.parts [NAME]`: print what DeepSpeed could compile here,
or compile one part.

A process of its own: to load DeepSpeed takes seconds, and a compile that is stopped must be ended
with its compilers.
"""

from __future__ import annotations

import json
import sys

from trainkit.extensions.deepspeed import adapter
from trainkit.extensions.deepspeed.extensions import PARTS


def main(names: list[str]) -> None:
    """Compile the parts that are named; without any, print a line of JSON."""
    for name in names:
        adapter.build(name)
    if not names:
        can_build = {name: adapter.can_build(name) for name in PARTS}
        print(
            json.dumps(
                {
                    "version": adapter.VERSION,
                    "device": adapter.device_type(),
                    "can_build": can_build,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
