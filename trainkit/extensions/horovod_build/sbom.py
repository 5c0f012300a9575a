"""What is in a wheel of Horovod, as a software bill of materials inside it (PEP 770): CycloneDX
1.6 in `sboms/horovod.cdx.json` of its .dist-info.

    describe   the release and each edit of it, the libraries that it carries along, what built it
    add        writes the file into a wheel, and its hash into RECORD

Scanners of an environment read it where pip has installed it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import zipfile
from pathlib import Path
from typing import Any

from trainkit.extensions.horovod_build.patches import edits
from trainkit.extensions.horovod_build.pip import SHA256, VERSION
from trainkit.extensions.horovod_build.probe import BuildPlan, Machine
from trainkit.version import __version__

FILE = "sboms/horovod.cdx.json"

# The folders of third_party/ in the release, whose hash `pip.py` holds: name -> (version, licence).
# Versions are those of their own headers and CMake files; "" where they have none. A licence is a
# name of SPDX; HTTPRequest says no more than BSD.
_CARRIED = {
    "boost": ("1.69.0", "BSL-1.0"),
    "eigen": ("3.4.0", "MPL-2.0"),
    "flatbuffers": ("2.0.0", "Apache-2.0"),
    "gloo": ("0.5.0", "BSD-3-Clause"),
    "HTTPRequest": ("", "BSD"),
    "lbfgs": ("", "MIT"),
}


def describe(machine: Machine, plan: BuildPlan, version: str) -> dict[str, Any]:
    """Return the bill of a wheel that is built on this machine.

    Args:
        machine: the tools that build it.
        plan: the parts that are built: MPI and NCCL are linked, and are named if they are on.
        version: of the wheel, see versions.build_version.
    """
    horovod = {
        "type": "library",
        "bom-ref": "horovod",
        "name": "horovod",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:pypi/horovod@{version.replace('+', '%2B')}",
        "pedigree": {
            "ancestors": [_release()],
            "patches": [
                {"type": "unofficial", "diff": {"text": {"content": text}}}
                for text in edits().values()
            ],
        },
    }
    parts = [*_carried(), *_linked(machine, plan)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [{"type": "application", "name": "trainkit", "version": __version__}]
            },
            "component": horovod,
            "properties": [
                {"name": f"trainkit:build:{name}", "value": value}
                for name, value in _built_with(machine, plan).items()
            ],
        },
        "components": parts,
        "dependencies": [
            {"ref": "horovod", "dependsOn": [part["bom-ref"] for part in parts]},
        ],
    }


def add(bill: dict[str, Any], wheel: Path) -> None:
    """Write a bill into a wheel, in the place of the wheel, atomically."""
    text = json.dumps(bill, indent=1).encode()
    temporary = wheel.with_suffix(".part")
    with (
        zipfile.ZipFile(wheel) as before,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as after,
    ):
        record = next(name for name in before.namelist() if name.endswith(".dist-info/RECORD"))
        place = record.removesuffix("RECORD") + FILE
        for entry in before.infolist():
            if entry.filename != record:
                after.writestr(entry, before.read(entry), zipfile.ZIP_DEFLATED)
        after.writestr(place, text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        line = f"{place},sha256={digest},{len(text)}\n"
        after.writestr(record, line + before.read(record).decode())
    os.replace(temporary, wheel)


def _release() -> dict[str, Any]:
    """Return the release that is edited; its hash is that of the sdist."""
    return {
        "type": "library",
        "name": "horovod",
        "version": VERSION,
        "purl": f"pkg:pypi/horovod@{VERSION}",
        "hashes": [{"alg": "SHA-256", "content": SHA256}],
    }


def _carried() -> list[dict[str, Any]]:
    """Return the libraries whose source is in the release."""
    return [
        _part(name, number, f"its source is in the release of Horovod, third_party/{name}")
        | {"licenses": [{"license": {"name" if licence == "BSD" else "id": licence}}]}
        for name, (number, licence) in _CARRIED.items()
    ]


def _linked(machine: Machine, plan: BuildPlan) -> list[dict[str, Any]]:
    """Return the libraries that are there when it is loaded, and that the wheel does not hold."""
    assert machine.torch is not None
    linked = [
        _part("torch", machine.torch.version, "is linked; built for this version")
        | {"purl": f"pkg:pypi/torch@{machine.torch.version.replace('+', '%2B')}"}
    ]
    if plan.mpi.on and machine.mpirun is not None:
        linked.append(_part("mpi", machine.mpirun.version, "is linked"))
    if plan.gpu.on:
        linked.append(_part("nccl", "", "is linked: the one that torch has loaded"))
    return linked


def _part(name: str, number: str, description: str) -> dict[str, Any]:
    part = {"type": "library", "bom-ref": name, "name": name, "description": description}
    return part | ({"version": number} if number else {})


def _built_with(machine: Machine, plan: BuildPlan) -> dict[str, str]:
    """Return the tools of the build with their versions."""
    tools = {
        "compiler": machine.compiler,
        "make": machine.make,
        "cmake": machine.cmake,
        "mpicxx": machine.mpicxx if plan.mpi.on else None,
        "nvcc": machine.nvcc if plan.gpu.on else None,
    }
    versions = {name: tool.version for name, tool in tools.items() if tool is not None}
    return {"python": platform.python_version(), "platform": machine.platform} | versions
