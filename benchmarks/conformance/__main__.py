"""`python -m benchmarks.conformance`: checks the claims, and writes results.json and the pages.

The exit code is 1 if a cell of trainkit is not as results.json recorded it, or a break is not seen.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.conformance.broken import BREAKS
from benchmarks.conformance.claims import load_claims
from benchmarks.conformance.page import (
    PAGE,
    RESULTS,
    load_results,
    markdown,
    write_html,
)
from benchmarks.conformance.suite import plan, run_all, run_broken, unseen, versions
from benchmarks.conformance.worker import TRAINERS


def read_arguments() -> argparse.Namespace:
    """Read the command line; an unknown claim ends it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--list", action="store_true", help="print the claims")
    parser.add_argument("--only", action="append", metavar="CLAIM", choices=list(load_claims()))
    parser.add_argument("--trainer", action="append", choices=list(TRAINERS))
    parser.add_argument(
        "--broken",
        nargs="*",
        choices=list(BREAKS),
        metavar="BREAK",
        help="check trainkit broken on purpose: in all ways, or in these",
    )
    parser.add_argument("--check", action="store_true", help="record nothing, write no page")
    parser.add_argument("--page", action="store_true", help="write the page of results.json")
    parser.add_argument("--html", type=Path, help="write the page as HTML here, too")
    return parser.parse_args()


def changed(recorded: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Return the cells of trainkit that are not as they were recorded."""
    return [
        f"{claim}, {start}: {result['status']} ({result['text']}), recorded as {before['status']}"
        for claim, by_trainer in results.items()
        for start, result in by_trainer.get("trainkit", {}).items()
        if (before := recorded.get(claim, {}).get("trainkit", {}).get(start))
        and before["status"] != result["status"]
    ]


def check_broken(names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Check breaks and print what they turn; return that, and what was not seen."""
    table = run_broken(names)
    seen = [
        {
            "break": name,
            "sentence": BREAKS[name].sentence,
            "turned": [c for c in BREAKS[name].turns if cells[c] == "fails"],
            "stays": BREAKS[name].stays if cells[BREAKS[name].stays] == "holds" else "",
        }
        for name, cells in table.items()
    ]
    for entry in seen:
        print(f"{entry['break']} -> {', '.join(entry['turned'])}; holds: {entry['stays']}")
    return seen, unseen(table)


def main() -> None:
    """Run."""
    options = read_arguments()
    if options.list:
        for name, claim in load_claims().items():
            print(f"{claim.kind:9} {name}: {claim.sentence}")
        return
    wrong: list[str] = []
    if options.broken is not None:
        seen, wrong = check_broken(options.broken)
        recorded = load_results()
        if not options.broken:
            recorded["broken"] = seen
    elif options.page:
        recorded = load_results()
    else:
        names = options.only or list(load_claims())
        results = run_all(plan(options.trainer or TRAINERS, names))
        recorded = load_results()
        wrong = changed(recorded["results"], results)
        for claim, by_trainer in results.items():
            recorded["results"].setdefault(claim, {}).update(by_trainer)
        recorded |= {"date": datetime.date.today().isoformat(), "versions": versions()}
    if not options.check:
        RESULTS.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(markdown(recorded))
    if options.html:
        write_html(recorded, options.html)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
