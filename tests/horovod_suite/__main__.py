"""Horovod's own tests of its release, with the Horovod of this environment: `make horovod-suite`.

    fetch            the tests, which the release's archive lacks, from Horovod's repository; the commit's id is checked
    run_group        one group of tests, in pytest or in two ranks of it; each process writes a report
    failures         which tests of a report failed
    known.py         which of them may, and why

It fails if another test fails, or if a process leaves no report: a crash, or a hang until the
group's time limit. HOROVOD_GIT names another repository with the same commit, for machines without
access to GitHub.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.horovod_suite.known import KNOWN
from trainkit.errors import EngineError
from trainkit.extensions.horovod_build.pip import VERSION, pip
from trainkit.extensions.programs.commands import run

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "horovod-suite"
SOURCE, PACKAGES, REPORTS, LOG = (BUILD / name for name in ("source", "packages", "reports", "log"))
COMMIT = "1d217b59949986d025f6db93c49943fb6b6cc78f"  # of the tag of VERSION
REPOSITORY = "https://github.com/horovod/horovod.git"
NEEDS = ("mock==5.2.0", "parameterized==0.9.0")


@dataclass(frozen=True)
class Group:
    """Tests that one start of pytest runs."""

    name: str
    files: tuple[str, ...]  # below Horovod's test/
    ranks: int  # 0: without a launcher
    timeout_s: float


_SINGLE = (
    "elastic_discovery",
    "elastic_driver",
    "elastic_run",
    "run",
    "service",
    "task_service",
    "torch_elastic",
    "util",
)
GROUPS = (
    Group("parallel", ("parallel/test_torch.py", "parallel/test_common.py"), 2, 900),
    Group("single", tuple(f"single/test_{name}.py" for name in _SINGLE), 0, 900),
    Group("integration", ("integration/test_elastic_torch.py",), 0, 1200),
)


def fetch() -> None:
    """Bring Horovod's tests, and what they import, into the build folder.

    Raises:
        EngineError: there is no network, or the repository has another commit at the tag.
    """
    if not (SOURCE / "test").is_dir():
        SOURCE.mkdir(parents=True, exist_ok=True)
        git = ["git", "-C", str(SOURCE)]
        url = os.environ.get("HOROVOD_GIT", REPOSITORY)
        run([*git, "init", "--quiet"], what="git init", log=LOG)
        tag = f"refs/tags/v{VERSION}"
        run(
            [*git, "fetch", "--depth", "1", url, tag],
            what=f"Fetching Horovod's tests from {url}",
            log=LOG,
        )
        found = subprocess.check_output(
            [*git, "rev-parse", "FETCH_HEAD^{commit}"], text=True
        ).strip()
        if found != COMMIT:
            raise EngineError(
                f"{url} has commit {found} at v{VERSION}; it must be {COMMIT}. None of it was run."
            )
        run([*git, "checkout", "--quiet", COMMIT, "--", "test"], what="git checkout", log=LOG)
    if not PACKAGES.is_dir():
        run(
            pip("install", "--target", str(PACKAGES), *NEEDS),
            what=f"Installing {', '.join(NEEDS)}",
            log=LOG,
        )


def run_group(group: Group) -> list[Path]:
    """Run a group, and return the paths of the reports that its processes are to write."""
    folders = [SOURCE / "test" / name for name in ("utils", "parallel", "single", "integration")]
    paths = [ROOT, PACKAGES, *folders]
    # Horovod's tests call its launcher as a function, and expect an elastic job's errors as
    # exceptions of its own driver.
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRAINKIT_ELASTIC_DRIVER": "horovod",
    }
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    files = " ".join(str(SOURCE / "test" / file) for file in group.files)
    report = str(REPORTS / group.name) + "-${HOROVOD_RANK:-0}.xml"
    pytest = (
        f"{sys.executable} -m pytest -q -c /dev/null --rootdir={SOURCE} -p no:cacheprovider"
        f" --junitxml={report} {files}"
    )
    # exit 0: the launcher ends all ranks if one fails, and the others would leave no report
    command = ["sh", "-c", f"{pytest}; exit 0"]
    if group.ranks:
        command = ["horovodrun", "--gloo", "-np", str(group.ranks), *command]
    reports = [REPORTS / f"{group.name}-{rank}.xml" for rank in range(max(1, group.ranks))]
    for path in reports:
        path.unlink(missing_ok=True)
    try:
        run(
            command,
            what=f"Horovod's {group.name} tests",
            log=LOG,
            env=env,
            timeout_s=group.timeout_s,
        )
    except EngineError as error:
        print(error)
    return reports


def failures(report: Path) -> tuple[int, set[str]]:
    """Return how many tests passed, and the names of those that failed:
    "test_torch.TorchTests.test_x".
    """
    passed, failed = 0, set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(".".join(name.split(".")[-3:]))
        elif case.find("skipped") is None:
            passed += 1
    return passed, failed


def judge(group: Group, reports: list[Path]) -> bool:
    """Print a group's results, and return whether nothing but known tests failed."""
    good = True
    for path in reports:
        if not path.exists():
            print(f"{group.name}: no {path.name}: the process crashed or hung")
            good = False
            continue
        passed, failed = failures(path)
        print(f"{path.stem}: {passed} passed, {len(failed)} failed")
        for name in sorted(failed):
            print(f"  {name}: {KNOWN.get(name, 'NOT KNOWN TO FAIL')}")
        good = good and passed > 0 and failed <= KNOWN.keys()
    return good


def main() -> int:
    """Run all groups, or those that the arguments name; return the exit code."""
    chosen = sys.argv[1:] or [group.name for group in GROUPS]
    unknown = set(chosen) - {group.name for group in GROUPS}
    if unknown:
        print(
            f"There is no group '{unknown.pop()}'; there are:"
            f" {', '.join(group.name for group in GROUPS)}",
            file=sys.stderr,
        )
        return 2
    try:
        fetch()
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    REPORTS.mkdir(parents=True, exist_ok=True)
    good = [judge(group, run_group(group)) for group in GROUPS if group.name in chosen]
    print(f"The output of all tests: {LOG}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
