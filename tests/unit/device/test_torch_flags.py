"""Switches set for the length of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit.device.torch_flags import torch_flags

PAGES = """
import contextlib, resource, sys
import torch
from trainkit.device.torch_flags import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step = [torch.ones(6 * 2**20) for _ in range(6)]  # 6 times 24 MiB: a step's activations
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
found = [faults()]
with keep_freed_memory():
    faults()
    found.append(faults())
faults()
found.append(faults())
print(*found)
"""


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="glibc's own way")
@pytest.mark.parametrize(
    "own",
    [{}, {"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1048576"}],
)
def test_a_steps_memory_is_kept_for_the_next(own: dict[str, str]) -> None:
    """Within the context the kernel hands out no new pages, before and after it does;
    a user's settings stay.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | {
        "OMP_NUM_THREADS": "1"
    }
    # if a small block happens to be at the heap's end, the kernel gets nothing back in any case
    for _ in range(12):
        done = subprocess.run(
            [sys.executable, "-c", PAGES], env=env | own, capture_output=True, text=True, check=True
        )
        before, within, after = map(int, done.stdout.split())
        if before and after:
            break
    if own:
        assert within > before / 2 > 100
    else:
        assert within < before / 10 and within < after / 10, done.stdout


def test_an_error_in_teardown_leaves_no_switch_on(tmp_path: Path) -> None:
    """Global switches of torch are put back whatever fails."""

    class Breaks(Line):
        def teardown(self, stage: str) -> None:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path, detect_anomaly=True).fit(Breaks(), loader(4))
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(("used", "own"), [(True, None), (True, ":16:8"), (False, None)])
def test_cublas_that_has_read_its_setting_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], used: bool, own: str | None
) -> None:
    """In a process that has used a GPU before, the variable that deterministic=true sets may be too
    late; a line says what to export.
    """
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back as it was
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    if own is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    with torch_flags(True, benchmark=False, detect_anomaly=False):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (own or ":4096:8")
    said = "".join(capsys.readouterr())
    assert ("export CUBLAS_WORKSPACE_CONFIG=:4096:8" in said) == (used and own is None)
