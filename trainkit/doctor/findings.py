"""Finding: the result of one check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    area: str  # its group: "software", "Horovod", ...
    name: str  # the checked thing
    value: str  # what was found, for people
    # "ok"; "warning": it works, but could be better; "wrong": something will not work
    status: Status = "ok"
    why: str = ""  # the consequence, in plain words; "" if all is well
    mend: str = ""  # remedy: a command if there is one


def guarded(area: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings; if the check raises, yield that as a finding."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(
            area,
            "this check",
            f"{type(error).__name__}: {error}",
            "warning",
            "The check itself failed.",
        )
