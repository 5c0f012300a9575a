"""--json of the commands that look at something: one JSON value on the standard output, and nothing
else there.

split_json     takes the flag from a command's arguments
facts_printed  gathers what a command has seen, and prints it at its end
print_json     prints it

With the flag, what is printed for people meanwhile (progress, notes) goes to the standard error. If
the command fails, its message is on the standard error, and the standard output is empty.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FLAG = "--json"
OPTION = (FLAG, "flag", "off", "for machines: the same as JSON, and nothing else on the output")


def split_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without the flag, and whether it was there."""
    return [word for word in arguments if word != FLAG], FLAG in arguments


@contextlib.contextmanager
def facts_printed(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a dict to fill; print it at the end of the context, if anything is in it."""
    facts: dict[str, Any] = {}
    if not as_json:
        yield facts
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield facts
    if facts:
        print_json(facts)


def print_json(facts: Any) -> None:
    """Print a value as JSON; see `json_text`."""
    print(json_text(facts), flush=True)


def json_text(facts: Any) -> str:
    """Return a value as JSON. A number that is not finite becomes null: JSON has none."""
    return json.dumps(_plain(facts), indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
