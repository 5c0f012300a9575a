"""Finding: the result of one check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        area: its group: "software", "Horovod", ...
        name: name of the checked thing.
        value: what was found, for people.
        status: "ok"; "warning": it works, but could be better; "wrong": something will not work.
        why: the consequence, in plain words; "" if all is well.
        mend: remedy: a command if there is one.
    """

    area: str
    name: str
    value: str
    status: Status = "ok"
    why: str = ""
    mend: str = ""


def guarded(area: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings; if the check raises, yield that as a finding."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(area, "this check", f"{type(error).__name__}: {error}", "warning", "The check itself failed.")
