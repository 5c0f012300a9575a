"""What the end of a run says, and the table in CONTRIBUTING.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.groups.runner import Ended
from tests.groups.table import ROOT, Group

PAGE = ROOT / "CONTRIBUTING.md"
_TABLE = re.compile(r"(<!-- groups -->\n).*?(<!-- end of groups -->)", re.DOTALL)


def end_of_run(ended: Iterable[Ended], seconds: float) -> str:
    """Return the last lines of a run:
    its slowest tests, why tests were skipped, what is over budget, and all counts.
    """
    ended = list(ended)
    tests = [(spent, name) for end in ended for name, spent in end.record["tests"].items()]
    lines = ["", "slowest tests:"] * bool(tests)
    lines += [f"  {spent:6.1f} s  {name}" for spent, name in sorted(tests, reverse=True)[:10]]
    skips: dict[str, int] = {}
    for end in ended:
        for reason, number in end.record["skips"].items():
            skips[reason] = skips.get(reason, 0) + number
    lines += ["", "skipped:"] * bool(skips) + [
        f"  {number:4}  {reason}" for reason, number in skips.items()
    ]
    lines += [""]
    for end in ended:
        if end.is_over_budget:
            took = (
                f"took {end.record['seconds']:.0f} s; its budget was {end.budget_s:.0f} s"
                " (tests/groups.toml)"
            )
            lines += [f"{end.group.name} {took}"]
    counts = {
        what: sum(end.record[what] for end in ended) for what in ("passed", "failed", "skipped")
    }
    said = ", ".join(f"{number} {what}" for what, number in counts.items())
    failed = [end.group.name for end in ended if not end.is_green]
    lines += [f"{said} in {seconds:.0f} s" + f"; failed: {', '.join(failed)}" * bool(failed)]
    return "\n".join(lines)


def table(groups: dict[str, Group], stamps: dict[str, dict[str, Any]]) -> str:
    """Return the groups as a table of Markdown:
    what each holds, and the figures of its last complete green run.
    """
    rows = [
        "| group | what it holds | tests | starts | seconds | of processors | before |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in groups.values():
        stamp = stamps.get(group.name)
        figures = ["", "", "", ""]
        if stamp is not None:
            figures = [
                str(stamp["passed"] + stamp["skipped"]),
                str(stamp["started"] or ""),
                f"{stamp['seconds']:.0f}",
                f"{stamp['cpu_s']:.0f}" if "cpu_s" in stamp else "",
            ]
        name = f"**{group.name}**" if group.quick else group.name
        rows.append(f"| {name} | {group.about} | {' | '.join(figures)} | {group.before_s or ''} |")
    return "\n".join(rows) + "\n"


def write_table(text: str) -> None:
    """Put the table into CONTRIBUTING.md."""
    page = PAGE.read_text()
    assert _TABLE.search(page), "CONTRIBUTING.md has lost the place of its table: <!-- groups -->"
    PAGE.write_text(_TABLE.sub(lambda marks: f"{marks[1]}{text}{marks[2]}", page))
