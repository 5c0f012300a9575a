"""What Horovod answers if a rank waits for a sum on a GPU and a peer is lost, without a GPU: its own
sources of that are compiled (half a minute) with a device and an NCCL of this test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainkit.extensions.horovod_build.patches import edited_source, version
from trainkit.extensions.horovod_build.pip import fetch_source
from trainkit.extensions.horovod_build.probe import probe

SOURCES = [
    "common/common.cc",
    "common/fusion_buffer_manager.cc",
    "common/half.cc",
    "common/logging.cc",
    "common/message.cc",
    "common/nvtx_op_range.cc",
    "common/ops/collective_operations.cc",
    "common/ops/cuda_operations.cc",
    "common/ops/gpu_operations.cc",
    "common/ops/nccl_operations.cc",
    "common/thread_pool.cc",
    "common/timeline.cc",
    "common/utils/env_parser.cc",
]
BOOST = [
    *("assert", "config", "core", "detail", "iterator", "lockfree", "mpl", "parameter", "predef"),
    *("preprocessor", "static_assert", "type_traits", "utility"),
]
HEADERS = ["cstdint", "stdexcept", "string", "horovod/common/logging.h"]
ABORTED = "NCCL's communicators were aborted, as a peer or an operation failed"


def _nvidias_headers() -> list[Path]:
    """Return the folders of the headers of CUDA's toolkit and of NCCL, or nothing."""
    machine = probe(os.environ)
    if machine.nvcc is None or machine.nccl is None:
        return []
    return [Path(machine.nvcc.path).parents[1] / "include", Path(machine.nccl.include)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Horovod's threads around this test's device and NCCL."""
    headers = _nvidias_headers()
    if not headers or shutil.which("g++") is None:
        pytest.skip("needs g++, a CUDA toolkit and NCCL")
    folder = tmp_path_factory.mktemp("waits")
    archive = fetch_source(folder, folder / "log")
    source = edited_source(archive, folder / "source", version())
    third_party = source / "third_party"
    include = [
        source,
        third_party / "flatbuffers" / "include",
        third_party / "eigen",
        third_party / "lbfgs" / "include",
        *(third_party / "boost" / name / "include" for name in BOOST),
        *headers,
    ]
    compiler = ["g++", "-std=c++17", "-O0", "-w", "-DHAVE_CUDA=1", "-DHAVE_GPU=1", "-DHAVE_NCCL=1"]
    compiler += [f"-I{path}" for path in include]
    compiler += [word for header in HEADERS for word in ("-include", header)]

    def compiled(number: int, paths: list[Path]) -> str:
        """One source of several: their headers are most of the work."""
        joined, out = folder / f"{number}.cc", str(folder / f"{number}.o")
        joined.write_text("".join(f'#include "{path}"\n' for path in paths))
        done = subprocess.run(
            [*compiler, "-c", str(joined), "-o", out],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[:4000]
        return out

    paths = [source / "horovod" / name for name in SOURCES]
    paths.append(Path(__file__).with_name("waits_on_devices.cc"))
    parts = [paths[: len(paths) // 2], paths[len(paths) // 2 :]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, range(len(parts)), parts))
    out = folder / "waits_on_devices"
    # What these sources call of the rest of Horovod, this program never reaches.
    link = ["g++", *objects, "-no-pie", "-lpthread", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run([*link, "-o", str(out)], check=True)
    return out


def _answers(program: Path, what: str, job: str) -> list[str]:
    """Return what the program prints: how two sums ended, and what it did to the communicator."""
    command = [str(program), what, job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("job", ["plain", "elastic"])
@pytest.mark.parametrize("what", ["lost", "failed"])
def test_a_sum_that_an_abort_has_ended_is_an_error(program: Path, what: str, job: str):
    """A peer was lost, or a call of NCCL failed: the sum on the device and the one behind it both
    end with an error, though the device calls the first complete; the communicator is aborted
    once, and not looked at any more.
    """
    assert _answers(program, what, job) == [
        f"first: {ABORTED}",
        f"second: {ABORTED}",
        "aborts: 1",
        "looks after the end: 0",
    ]


def test_sums_that_end_by_themselves_are_waited_for(program: Path):
    """All ranks end, while sums are computed: both have their result, and nothing is aborted."""
    assert _answers(program, "ended", "plain") == [
        "first: OK",
        "second: OK",
        "aborts: 0",
        "looks after the end: 0",
    ]
