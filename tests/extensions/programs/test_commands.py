"""Commands of Horovod's build: how they end, and how a failure is reported."""

from __future__ import annotations

import fcntl
import sys
import textwrap
from pathlib import Path

import pytest

from trainkit.errors import EngineError
from trainkit.extensions.programs.commands import advice, failure, first_error, run

GCC = """
  [ 40%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o
  cd /tmp/build && /usr/bin/c++ -DEIGEN_MPL2_ONLY=1 -O3 -o CMakeFiles/pytorch.dir/adapter_v2.cc.o
  In file included from /env/include/torch/extension.h:5,
                   from horovod/torch/adapter_v2.h:19:
  /env/include/torch/all.h:9:2: error: #error C++20 or later compatible compiler is required to use PyTorch.
      9 | #error C++20 or later compatible compiler is required to use PyTorch.
        |  ^~~~~
  [ 41%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/ready_event.cc.o
  make[2]: *** [CMakeFiles/pytorch.dir/build.make:76: adapter_v2.cc.o] Error 1
  subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.
  error: subprocess-exited-with-error
"""
CMAKE = """
  -- Looking for a CUDA compiler - NOTFOUND
  CMake Error at /env/FindPackageHandleStandardArgs.cmake:290 (message):
    Could NOT find CUDAToolkit (missing: CUDAToolkit_INCLUDE_DIR CUDA_CUDART)
  Call Stack (most recent call first):
    horovod/torch/CMakeLists.txt:23 (add_cuda)

  -- Configuring incomplete, errors occurred!
"""
KILLED = """
  [ 56%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/controller.cc.o
  c++: fatal error: Killed signal terminated program cc1plus
  compilation terminated.
  make[2]: *** [controller.cc.o] Error 1
"""
NO_COMPILER = """
  CMake Error at CMakeLists.txt:18 (project):
    No CMAKE_CXX_COMPILER could be found.
"""
NO_NETWORK = """
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError: Temporary failure in name resolution'
ERROR: Could not find a version that satisfies the requirement horovod==0.28.1 (from versions: none)
ERROR: No matching distribution found for horovod==0.28.1
"""
NO_TORCH = """
  Traceback (most recent call last):
    File "<string>", line 1, in <module>
  ModuleNotFoundError: No module named 'torch'
  CMake Error at FindPackageHandleStandardArgs.cmake:290 (message):
    Could NOT find Pytorch (missing: Pytorch_VERSION) (Required is at least version "1.5.0")
"""
LINK = """
  /usr/bin/ld: pytorch.dir/mpi_ops_v2.cc.o: in function `horovod::torch::DoAllreduce':
  mpi_ops_v2.cc:(.text+0x1a2): undefined reference to `ncclCommInitRank'
  collect2: error: ld returned 1 exit status
"""
RANK = """
[1]<stderr>:Traceback (most recent call last):
[1]<stderr>:  File "proof.py", line 8, in <module>
[1]<stderr>:ImportError: libmpi.so.40: cannot open shared object file
Process 1 exit with status code 1.
RuntimeError: Horovod detected that one or more processes exited with non-zero status
"""


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (GCC, "/env/include/torch/all.h:9:2: error: #error C++20 or later"),
        (CMAKE, "CMake Error at /env/FindPackageHandleStandardArgs.cmake:290 (message):"),
        (KILLED, "c++: fatal error: Killed signal terminated program cc1plus"),
        (NO_NETWORK, "ERROR: Could not find a version"),
        (NO_TORCH, "ModuleNotFoundError: No module named 'torch'"),
        (RANK, "[1]<stderr>:ImportError: libmpi.so.40"),
        (LINK, "mpi_ops_v2.cc:(.text+0x1a2): undefined reference"),
    ],
)
def test_first_error_of_a_log_is_found(log: str, first: str):
    """The output starts with the first error line, and has at most five lines."""
    shown = first_error(log.splitlines())
    assert shown[0].startswith(first)
    assert len(shown) <= 5


def test_what_make_echoes_is_left_out():
    """With parallel compilers, progress and commands appear between the lines of a message;
    they are dropped.
    """
    shown = "\n".join(first_error(GCC.splitlines()))
    assert "^~~~~" in shown
    assert "ready_event" not in shown
    assert "make[2]" not in shown


def test_log_without_errors_shows_none():
    """Flags and file names that only resemble errors are ignored."""
    lines = [
        "c++ -Werror=return-type -o error.cc.o",
        "  copying horovod/common/exceptions.py",
        "0 errors, 2 warnings",
    ]
    assert first_error(lines) == []


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        (GCC, "too old for C++20"),
        (CMAKE, "install --cpu"),
        (KILLED, "install --jobs 1"),
        (NO_COMPILER, "apt-get install g++ make"),
        (NO_NETWORK, "install --source horovod-0.28.1.tar.gz"),
        (NO_TORCH, "pip install torch"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
            "none of it was run",
        ),
        ("ModuleNotFoundError: No module named 'distutils'", "pip install setuptools"),
        ("error: externally-managed-environment", "python -m venv"),
        ("No module named pip", "ensurepip"),
        ("a.cc:1:1: error: something new", "This failure is unknown"),
    ],
)
def test_known_causes_have_their_remedy(log: str, remedy: str):
    """Each known cause has its remedy; an unknown one gets no guess."""
    lines = log.splitlines()
    assert remedy in advice(first_error(lines) or lines, lines)


def test_failure_of_a_long_log_is_a_few_lines(tmp_path: Path):
    """Four hundred lines of output become at most eight, with the path of the log."""
    lines = ["x" * 1000] * 200 + CMAKE.splitlines() + ["x" * 1000] * 200
    text = failure("Building failed", lines, tmp_path / "log")
    assert len(text.splitlines()) <= 8
    assert str(tmp_path / "log") in text
    assert max(len(line) for line in text.splitlines()) < 300


def test_failure_without_a_known_error_shows_its_end(tmp_path: Path):
    """Without a known error line, only the last five lines are shown."""
    text = failure("It failed", [f"line {i}" for i in range(400)], tmp_path / "log")
    assert text.splitlines()[1:6] == [f"  line {i}" for i in range(395, 400)]
    assert len(text.splitlines()) == 8


def _python(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(body)]


def test_run_hands_on_lines_and_keeps_the_log(tmp_path: Path):
    """Every printed line is returned, passed on and in the log,
    also a last one without a newline.
    """
    seen: list[str] = []
    body = (
        "import sys; print('one', flush=True); print('two', file=sys.stderr, flush=True);"
        " sys.stdout.write('three')"
    )
    lines = run(_python(body), what="It", log=tmp_path / "logs" / "log", on_line=seen.append)
    assert lines == seen == ["one", "two", "three"]
    assert (tmp_path / "logs" / "log").read_text() == "one\ntwo\nthree"


def test_failing_command_names_cause_and_log(tmp_path: Path):
    """A command that fails raises with its exit code, its own words and the path of its log."""
    with pytest.raises(
        EngineError, match=r"It failed \(exit code 3\):\n  gone wrong\n(.*\n)*.*log"
    ) as caught:
        run(_python("print('gone wrong'); raise SystemExit(3)"), what="It", log=tmp_path / "log")
    assert str(tmp_path / "log") in str(caught.value)


def test_command_out_of_time_is_ended(tmp_path: Path):
    """A command that never ends is ended at its time limit, which is reported."""
    with pytest.raises(EngineError, match=r"It took more than 0 s and was ended"):
        run(_python("import signal; signal.pause()"), what="It", log=tmp_path / "log", timeout_s=0)


def test_no_way_out_leaves_a_process_behind(tmp_path: Path):
    """Ctrl-C ends the command's children too, also a grandchild that ignores SIGTERM."""
    lock = tmp_path / "lock"
    grandchild = f"""
        import fcntl, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        file = open({str(lock)!r}, "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked", flush=True)
        signal.pause()
    """
    child = f"""
        import signal, subprocess, sys
        subprocess.Popen([sys.executable, "-c", {textwrap.dedent(grandchild)!r}])
        signal.pause()
    """

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(_python(child), what="It", log=tmp_path / "log", on_line=interrupt)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits forever where the grandchild lives on
