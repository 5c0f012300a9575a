"""The bill of materials in a wheel of Horovod: what it names, and where a wheel has it."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tests.extensions.horovod_build.test_build import CPU, GPU, MACHINE, MPI
from trainkit.extensions.horovod_build import patches, sbom
from trainkit.extensions.horovod_build.pip import SHA256
from trainkit.extensions.horovod_build.probe import BuildPlan


@pytest.mark.parametrize(
    ("plan", "linked", "tools"),
    [
        (CPU, {"torch"}, set()),
        (MPI, {"torch"}, {"mpicxx"}),
        (GPU, {"torch", "nccl"}, {"nvcc"}),
    ],
)
def test_it_names_source_edits_and_libraries(
    plan: BuildPlan, linked: set[str], tools: set[str]
) -> None:
    """The release by its hash, each edit with its text, what the source carries along, and of what
    is linked and builds it only what this build uses.
    """
    bill = sbom.describe(MACHINE, plan, "0.28.1+trainkit.e1.torch2.15.0")
    horovod = bill["metadata"]["component"]
    assert horovod["purl"] == "pkg:pypi/horovod@0.28.1%2Btrainkit.e1.torch2.15.0"
    (release,) = horovod["pedigree"]["ancestors"]
    assert release["hashes"] == [{"alg": "SHA-256", "content": SHA256}]
    texts = [patch["diff"]["text"]["content"] for patch in horovod["pedigree"]["patches"]]
    assert texts == list(patches.edits().values())
    names = {part["bom-ref"] for part in bill["components"]}
    carried = {"boost", "eigen", "flatbuffers", "gloo", "HTTPRequest", "lbfgs"}
    assert names == carried | linked
    assert set(bill["dependencies"][0]["dependsOn"]) == names
    built = {entry["name"].rpartition(":")[2] for entry in bill["metadata"]["properties"]}
    assert built == {"python", "platform", "compiler", "make", "cmake"} | tools


def test_a_wheel_has_it_beside_its_own_files(tmp_path: Path) -> None:
    """pip installs it with the wheel: RECORD has its hash and size, and all else is as before."""
    wheel = tmp_path / "horovod-1-py3-none-any.whl"
    before = {"horovod/__init__.py": "x = 1\n", "horovod-1.dist-info/METADATA": "Name: horovod\n"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in before.items():
            archive.writestr(name, text)
        archive.writestr("horovod-1.dist-info/RECORD", "horovod/__init__.py,,\n")
    bill = {"bomFormat": "CycloneDX"}
    sbom.add(bill, wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        assert {name: archive.read(name).decode() for name in before} == before
        text = archive.read("horovod-1.dist-info/sboms/horovod.cdx.json")
        lines = archive.read("horovod-1.dist-info/RECORD").decode().splitlines()
    assert json.loads(text) == bill
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
    assert lines == [
        f"horovod-1.dist-info/sboms/horovod.cdx.json,sha256={digest},{len(text)}",
        "horovod/__init__.py,,",
    ]
