"""The server of forks has its memory in large pages, where the system has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.huge_pages import merge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _large_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(
    not SETTING.is_file() or "[never]" in SETTING.read_text(), reason="the system has none"
)
def test_memory_is_merged_and_keeps_its_content() -> None:
    """In a process of its own: the one that runs tests would keep them."""
    content = bytearray(os.urandom(1 << 20) * 8)
    before = bytes(content)
    pid = os.fork()
    if pid == 0:
        merged = merge_pages()
        is_there = merged >= 4 << 20 and _large_kib(os.getpid()) >= 4 << 10
        os._exit(0 if is_there and content == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
