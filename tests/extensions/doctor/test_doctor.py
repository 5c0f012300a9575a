"""doctor: each possible fault is reported with its remedy."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.extension import Finding
from trainkit.extensions.doctor import command, gpus, host, network, software, sums
from trainkit.extensions.doctor.command import guarded
from trainkit.extensions.doctor.software import TorchSeen
from trainkit.extensions.horovod_build import checks as horovod
from trainkit.extensions.horovod_build.check import Installed
from trainkit.extensions.horovod_build.patches import version as edited_version
from trainkit.extensions.horovod_build.probe import Machine

GOOD = TorchSeen(torch="2.15.0", torchvision="0.29.2")
MACHINE = Machine(None, None, None, None, None, None, None, "", 2, 8.0)


def troubles(findings: Any) -> dict[str, Finding]:
    """Return the findings that are not ok, by name; each has a reason and a remedy."""
    chosen = {finding.name: finding for finding in findings if finding.status != "ok"}
    assert all(finding.why and finding.remedy for finding in chosen.values())
    return chosen


def test_good_software_has_no_trouble() -> None:
    """This environment's own."""
    assert troubles(software.look(software.ask_torch())) == {}


@pytest.mark.parametrize(
    ("torch", "name", "says"),
    [
        (
            TorchSeen(errors={"torch": "ImportError: libcudart"}),
            "torch",
            "cannot be imported: ImportError: libcudart",
        ),
        (TorchSeen(torch="2.9.1", torchvision="0.24"), "torch", "torch 2.11 or newer"),
        (
            TorchSeen(torch="2.15.0", errors={"torchvision": "torchvision::nms does not exist"}),
            "torchvision",
            "nms does not exist",
        ),
    ],
)
def test_bad_torch_is_reported(torch: TorchSeen, name: str, says: str) -> None:
    """It is missing or broken, too old, or does not fit torchvision."""
    finding = troubles(software.look(torch))[name]
    assert finding.status == "wrong" and says in finding.why and "pip install" in finding.remedy


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 9), "wrong"), ((3, 10), "ok"), ((3, 14), "ok"), ((3, 15), "warning")],
)
def test_pythons_that_are_not_tested(version: tuple[int, int], status: str) -> None:
    """Too old is wrong, newer than tested is a warning."""
    assert software._python(version).status == status


def test_tested_pythons_are_those_of_the_package() -> None:
    """Its classifiers, from the first to the last."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    minors = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", text)]
    assert ((3, min(minors)), (3, max(minors))) == software.PYTHONS


def test_a_torch_that_crashes_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import may end Python, before or after torch itself."""
    ask = software.ask_torch.__wrapped__  # not the answer of this process so far
    monkeypatch.setattr(
        software, "_ASK", 'import sys; print(\'{"torch": "2.15.0"}\', flush=True); sys.exit(139)'
    )
    asked = ask()
    assert asked.torch == "2.15.0" and "exit code 139" in asked.errors["torchvision"]
    monkeypatch.setattr(software, "_ASK", "raise RuntimeError('no torch at all')")
    assert "no torch at all" in ask().errors["torch"]
    monkeypatch.setattr(software, "_ASK", "import os; os._exit(3)")
    assert "exit code 3" in ask().errors["torch"]


def test_no_horovod_is_reported_with_what_its_build_lacks() -> None:
    """And the command that builds it."""
    by_name = troubles(horovod.look(None, GOOD, MACHINE))
    assert by_name["installed"].remedy == "python -m trainkit horovod install"
    assert by_name["to build it"].value == "missing: g++, make"


def test_a_horovod_that_does_not_fit_is_reported() -> None:
    """Built for another torch; or without NCCL on a host with GPUs."""
    other = Installed(edited_version(), "2.14.0", ("gloo",), None)
    by_name = troubles(horovod.look(other, GOOD, MACHINE))
    assert "built for torch 2.14.0, and torch 2.15.0 is installed" in by_name["installed"].why
    fits = Installed(edited_version(), "2.15.0", ("gloo",), None)
    assert troubles(horovod.look(fits, GOOD, MACHINE)).keys() <= {"horovodrun"}
    slow = troubles(horovod.look(fits, TorchSeen(torch="2.15.0", gpus=2), MACHINE))["sums on GPUs"]
    assert slow.remedy.endswith("--gpu")


def test_without_torch_nothing_is_said_of_what_was_built_for_it() -> None:
    """Nor about torchvision: there is one fault, reported once."""
    other = Installed(edited_version(), "2.14.0", ("gloo",), None)
    assert troubles(horovod.look(other, TorchSeen(errors={"torch": "broken"}), MACHINE)).keys() <= {
        "horovodrun"
    }
    assert list(troubles(software.look(TorchSeen(errors={"torch": "broken"})))) == ["torch"]


def test_a_horovodrun_that_the_shell_does_not_find_is_reported() -> None:
    """The shell finds none, or another environment's:
    the README's commands would not run this one.
    """
    assert "A shell finds none" in horovod._launcher(None).why
    other = horovod._launcher("/usr/bin/horovodrun")
    assert "/usr/bin/horovodrun" in other.why and other.remedy.endswith("bin/activate")
    assert horovod._launcher(other.value).status == "ok"


def test_what_is_broken_is_installed_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip does not reinstall a broken package without force; a missing one needs no force."""
    assert "--force-reinstall" in software._install()
    monkeypatch.setattr(software, "_has", lambda package: False)
    assert software._install() == "pip install torch torchvision"


class Nvml:
    """Replaces NVML on a host with one GPU."""

    NVMLError = RuntimeError
    NVML_COMPUTEMODE_PROHIBITED = 2
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32

    def __init__(self, used_gib: float = 1, mode: int = 0, slow: int = 0) -> None:
        self.used_gib, self.mode, self.slow = used_gib, mode, slow

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self.used_gib * 2**30, total=80 * 2**30)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H100"

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.mode

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        if self.slow < 0:
            raise RuntimeError("not supported")
        return self.slow


@pytest.mark.parametrize(
    ("nvml", "names"),
    [
        (Nvml(), set()),
        (Nvml(slow=-1), set()),  # a driver that does not tell
        (Nvml(used_gib=30), {"GPU 0"}),
        (Nvml(mode=2), {"GPU 0 mode"}),
        (Nvml(slow=32), {"GPU 0 clock"}),
    ],
)
def test_a_gpu_that_is_not_free_is_reported(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, names: set[str]
) -> None:
    """Its memory is used, its compute mode is prohibited, or it is throttled."""
    monkeypatch.setattr(gpus, "_nvml", lambda: nvml)
    seen = TorchSeen(torch="2.15.0", cuda="13.2", gpus=1, names=["H100"], nccl="2.30")
    assert troubles(gpus.look(seen)).keys() == names


def test_a_gpu_that_reports_no_memory_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB200, and a GPU that is split into instances, do not say how much there is: the doctor
    continues with its mode.
    """

    class Silent(Nvml):
        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
            raise self.NVMLError("not supported")

    monkeypatch.setattr(gpus, "_nvml", lambda: Silent(mode=2))
    by_name = {f.name: f for f in gpus.look(TorchSeen(torch="2.15.0", cuda="13.2", gpus=1))}
    assert by_name["GPU 0"].value == "H100 (its memory is not reported)"
    assert by_name["GPU 0 mode"].status == "wrong"


@pytest.mark.parametrize(
    ("torch", "hidden", "says"),
    [
        (TorchSeen(torch="2.15.0"), None, "built without CUDA"),
        (TorchSeen(torch="2.15.0", cuda="13.2"), None, "driver is too old for CUDA 13.2"),
        (TorchSeen(torch="2.15.0", cuda="13.2"), "", "hides all 1"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_reported(
    monkeypatch: pytest.MonkeyPatch, torch: TorchSeen, hidden: str | None, says: str
) -> None:
    """And why."""
    monkeypatch.setattr(gpus, "_nvml", Nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert says in troubles(gpus.look(torch))["torch sees"].why


def test_a_gpu_that_no_rank_uses_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without nvidia-ml-py the driver's device files show it."""
    monkeypatch.setattr(gpus, "_nvml", lambda: None)
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = troubles(gpus.look(TorchSeen(torch="2.15.0", cuda="13.2")))["torch sees"]
    assert "hides all 2" in finding.why and finding.remedy == "unset CUDA_VISIBLE_DEVICES"


def test_no_gpu_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training runs on the CPU."""
    monkeypatch.setattr(gpus, "_nvml", lambda: None)
    assert [(f.value, f.status) for f in gpus.look(GOOD)] == [
        ("none: training runs on the CPU", "ok")
    ]


Usage = namedtuple("Usage", "total used free")


def test_small_limits_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shared memory of a container, open files, a full disk, a quota of cores."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(host, "_cpu_quota", lambda: 0.5)
    by_name = troubles(host.look(GOOD))
    assert by_name.keys() == {
        "shared memory",
        "open files",
        "disk here",
        "disk for temporary files",
        "threads",
    }
    assert (
        "--shm-size" in by_name["shared memory"].remedy
        and by_name["open files"].remedy == "ulimit -n 4096"
    )
    assert by_name["threads"].remedy == "export OMP_NUM_THREADS=1"
    assert "limits.conf" in host._open_files((1024, 2048)).remedy


def test_few_cores_for_many_gpus_are_reported() -> None:
    """Loading would hold the GPUs up."""
    assert host._workers(8, 8).status == "warning"
    assert "data.num_workers=3 suits 2 ranks" in host._workers(8, 2).value


def test_what_a_launcher_left_is_reported() -> None:
    """A shell with RANK set would count as a rank; secrets are not shown."""
    left = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4"}
    findings = list(
        network.look(
            left | {"CUDA_LAUNCH_BLOCKING": "1", "HOROVOD_SECRET_KEY": "abc", "NCCL_DEBUG": "INFO"}
        )
    )
    assert troubles(findings).keys() >= {"launcher's variables", "CUDA_LAUNCH_BLOCKING"}
    assert (
        troubles(findings)["launcher's variables"].remedy
        == "unset RANK TORCHELASTIC_RUN_ID WORLD_SIZE"
    )
    assert "rank 1 of 4, started by torchrun" in troubles(findings)["launcher's variables"].why
    assert "launcher's variables" not in troubles(network.look({"RANK": "1", "WORLD_SIZE": "4"})), (
        "these are read with others"
    )
    (variables,) = [f.value for f in findings if f.name == "variables"]
    assert "NCCL_DEBUG=INFO" in variables and "abc" not in variables


def test_a_check_that_breaks_is_a_finding() -> None:
    """The other checks continue."""

    def look() -> Any:
        yield Finding("a", "first", "x")
        raise OSError("no such device")

    findings = list(guarded("a", look))
    assert [f.status for f in findings] == ["ok", "warning"] and "no such device" in findings[
        1
    ].value


def test_two_ranks_that_cannot_add_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding has their output."""
    monkeypatch.setattr(sums, "_SCRIPT", "raise RuntimeError('no route to host')")
    (finding,) = sums.look("torchrun", "remedy it")
    assert (
        finding.status == "wrong"
        and "no route to host" in finding.why
        and finding.remedy == "remedy it"
    )


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("wrong", 1)])
def test_the_exit_code_is_for_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: Any, code: int
) -> None:
    """1 if something is wrong; --json prints nothing but the findings."""
    monkeypatch.setattr(
        command,
        "examine",
        lambda allreduce: iter([Finding("a", "b", "c", status, "since", "do this")]),
    )
    assert command.main("doctor", ["--json"]) == code
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed == {
        "area": "a",
        "name": "b",
        "value": "c",
        "status": status,
        "why": "since",
        "remedy": "do this",
    }
    assert command.main("doctor", []) == code
    assert ("do this" in capsys.readouterr().out) == (status != "ok")


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the usage."""
    assert command.main("doctor", ["--jsn"]) == 2
    assert "--jsn is not understood" in capsys.readouterr().err
