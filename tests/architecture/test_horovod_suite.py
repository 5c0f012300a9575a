"""`make horovod-suite` fails if a test of Horovod's fails that is not known to,
and if a process crashes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.horovod_suite.__main__ import Group, judge
from tests.horovod_suite.known import KNOWN

CASE = '<testcase classname="{}" name="{}">{}</testcase>'
PASSED = CASE.format("test.parallel.test_torch.TorchTests", "test_ok", "")
FAILED = "<failure message='no'/>"


@pytest.mark.parametrize(
    ("cases", "good"),
    [
        (PASSED, True),
        (
            PASSED
            + CASE.format("test.parallel.test_torch.TorchTests", "test_force_allreduce", FAILED),
            True,
        ),
        (PASSED + CASE.format("test.parallel.test_torch.TorchTests", "test_ok", FAILED), False),
        (PASSED + CASE.format("", "test.parallel.test_torch", "<error message='no'/>"), False),
        ("", False),
        (None, False),
    ],
)
def test_only_known_failures_are_accepted(tmp_path: Path, cases: str | None, good: bool) -> None:
    """A failure, an error of an import, no test at all and no report (None) are not."""
    assert "test_torch.TorchTests.test_force_allreduce" in KNOWN
    report = tmp_path / "parallel-0.xml"
    if cases is not None:
        report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert judge(Group("parallel", (), 1, 1), [report]) is good
