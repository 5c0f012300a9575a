"""python -m tests.groups: runs groups of tests.groups.toml.

    quick            those of `make test`
    all              every group, side by side as the cores allow
    due minutes=25   groups whose sources changed since their last complete green run, while the minutes last;
                     a few tests that fail run once more, alone, and are named
    ages             fail if a group has not run for 150 commits
    table            CONTRIBUTING.md's table again
    again NAME ...   tests of these groups that failed in their last run, at a later commit; if all pass, the groups have stamps
    NAME ...         these groups

Arguments after -- go to pytest.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from tests.groups.plugin import read_record, record_commit, write_record
from tests.groups.report import end_of_run, table, write_table
from tests.groups.runner import Ended, run_groups
from tests.groups.stamps import (
    clean_commit,
    due,
    is_ancestor,
    joined,
    read_stamps,
    stamp_of,
    too_old,
    write_stamps,
)
from tests.groups.table import Group, all_groups


def main(words: list[str]) -> int:
    """Run the command; return the exit code: 1 if a test failed, 2 if the request is illegal."""
    options = words[words.index("--") + 1 :] if "--" in words else []
    names = words[: words.index("--")] if "--" in words else words
    groups = all_groups()
    if names in (["quick"], ["all"]):
        chosen = [group for group in groups.values() if group.quick or names == ["all"]]
        if names == ["all"]:
            os.environ["TRAINKIT_TEST_SEARCH"] = "1"
        return _run(chosen, options, budgets_count=names == ["all"])
    if (
        names[:1] == ["due"]
        and len(names) <= 2
        and all(word.startswith("minutes=") for word in names[1:])
    ):
        return _run_due(
            float(names[1].partition("=")[2]) if len(names) == 2 else float("inf"), options
        )
    if names == ["ages"]:
        return _check_ages()
    if names == ["table"]:
        write_table(table(groups, read_stamps()))
        return 0
    if names[:1] == ["again"] and len(names) > 1 and all(name in groups for name in names[1:]):
        return max(_run_again(groups[name]) for name in names[1:])
    if not names or any(name not in groups for name in names):
        print(__doc__ + f"\nThe groups are {', '.join(groups)}.", file=sys.stderr)
        return 2
    return _run([groups[name] for name in names], options)


_MOST_ODD = 3  # failures of a group that may be of the machine's other work


def _run(
    groups: list[Group], options: list[str], budgets_count: bool = False, once_more: bool = False
) -> int:
    """Run groups, stamp the green ones, print the end; return the exit code.

    Args:
        budgets_count: a group over its budget fails the run.
        once_more: a group of which a few tests failed fails the run only if they fail alone too.
    """
    start, commit = time.monotonic(), None if options else clean_commit()

    def stamp(end: Ended) -> None:
        if commit is None or commit != clean_commit():  # files changed while it ran
            return
        if not end.group.commands:
            record_commit(end.group.name, commit)
        new = stamp_of(end.record, commit)
        if new is not None:
            write_stamps({end.group.name: new})
            write_table(table(all_groups(), read_stamps()))

    ended = run_groups(groups, options, on_end=stamp)
    print(end_of_run(ended, time.monotonic() - start), flush=True)
    is_late = budgets_count and any(end.is_over_budget for end in ended)
    red = [end for end in ended if not end.is_green]
    return int(is_late or not all(once_more and _pass_alone(end) for end in red))


def _pass_alone(end: Ended) -> bool:
    """Whether the few tests that failed in a group pass with nothing beside them; they are named.

    The group has no stamp, so it stays due.
    """
    failures = end.record.get("failures", [])
    if end.record["exit"] != 1 or not 0 < len(failures) <= _MOST_ODD:
        return False
    try:
        (again,) = run_groups([replace(end.group, chosen=tuple(failures), workers=0)], [])
    finally:
        write_record(end.group.name, end.record)
    if not again.is_green or again.record["passed"] < len(failures):
        return False
    print(f"{end.group.name} has no stamp: beside other tests these failed, and alone they passed:")
    print("\n".join(f"  {name}" for name in failures), flush=True)
    return True


def _run_due(minutes: float, options: list[str]) -> int:
    """Run the groups that are due, each if what it took last time, or its budget, still fits;
    name the others.
    """
    stamps = read_stamps()
    seconds_left, chosen = 60 * minutes, []
    for one in due(all_groups(), stamps):
        if one.group.quick:  # `make test` has run it
            continue
        needed = stamps.get(one.group.name, {}).get("seconds", one.group.budget_s)
        since = (
            f"since {one.since[:9]}: {', '.join(one.changed[:3])}{' ...' * (len(one.changed) > 3)}"
            if one.since
            else "ever"
        )
        if needed <= seconds_left:
            seconds_left -= needed
            chosen.append(one.group)
            print(f"{one.group.name:<10} is due: it has not run {since}")
        else:
            print(
                f"{one.group.name:<10} is LEFT OUT ({needed:.0f} s, {max(seconds_left, 0):.0f} s"
                f" left): it has not run {since}"
            )
    if not chosen:
        print(
            "no group is due"
            if seconds_left == 60 * minutes
            else "no group fits into the time left"
        )
        return 0
    return _run(chosen, options, once_more=True)


def _run_again(group: Group) -> int:
    """Run the tests that failed in a group's last complete run;
    stamp the group at that run's commit if they pass now.
    """
    before, commit = read_record(group.name), clean_commit()
    failures, ran_at = before.get("failures", []), before.get("commit")
    if not failures or ran_at is None or commit is None:
        why = (
            "the working tree is not a commit"
            if commit is None
            else "its last run was at no commit, or nothing failed in it"
        )
        print(f"{group.name}: {why}: run `make {group.name}`", file=sys.stderr)
        return 2
    record = before
    try:
        (end,) = run_groups([replace(group, chosen=tuple(failures))], [])
        record = joined(before, end.record, commit_is_later=is_ancestor(ran_at, commit))
    finally:  # also if it is interrupted
        write_record(group.name, record)
    new = stamp_of(record, ran_at)
    if new is not None:
        write_stamps({group.name: new})
        write_table(table(all_groups(), read_stamps()))
    print(end_of_run([end], end.record["seconds"]), flush=True)
    return int(new is None)


def _check_ages() -> int:
    # each run of `make test` has those
    groups = {name: group for name, group in all_groups().items() if not group.quick}
    reasons = too_old(groups, read_stamps())
    for name, reason in reasons.items():
        print(f"{name} {reason}: run `make {name}`, and commit tests/stamps.json", file=sys.stderr)
    return int(bool(reasons))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the groups that run, too
    sys.exit(main(sys.argv[1:]))
