"""What was found, and whether it is good."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: where it belongs: "software", "Horovod", ...
        name: what it is.
        value: what was found, for people.
        status: "ok"; "warning": it works, and could be better; "wrong": something will not work.
        why: what that means, in plain words; "" where all is well.
        mend: what to do: a command where there is one.
    """

    area: str
    name: str
    value: str
    status: Status = "ok"
    why: str = ""
    mend: str = ""


def guarded(area: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what a look finds; where it breaks, that is a finding and not the end."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(area, "this check", f"{type(error).__name__}: {error}", "warning", "It could not be looked at.")
