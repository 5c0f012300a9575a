"""The actor of a slot, without Ray:
it starts a worker, copies its output, signals it, and reports what its node lacks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainkit.extensions.elastic import reaper
from trainkit.extensions.ray.keeper import Keeper

PYTHON = {"PYTHONPATH": str(Path(__file__).parents[4])}
REAPER = Path(reaper.__file__).read_text()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """A keeper in this process."""
    made = Keeper(REAPER, str(tmp_path), "127.0.0.1")
    yield made
    made._reaper.communicate()


def run(
    keeper: Keeper, worker: str, command: list[str], call: bytes | None = None
) -> dict[str, Any]:
    """Run a worker to its end; return what came, put together."""
    received: dict[str, Any] = {}
    for name, part in keeper.run(worker, command, {"A": "x"}, call):
        assert "code" not in received, "the code comes last"
        received[name] = received.get(name, b"") + part if isinstance(part, bytes) else part
    return received


def test_a_worker_runs_with_its_environment_and_its_output_is_streamed(
    keeper: Keeper, tmp_path: Path
) -> None:
    """The word python is the keeper's own; the folder is the driver's; the code comes last."""
    program = (
        "import os, sys; print(os.getcwd(), os.environ['A'], os.environ['HOROVOD_GLOO_IFACE']); "
    )
    received = run(
        keeper, "w", ["python", "-c", program + "print('e', file=sys.stderr); sys.exit(7)"]
    )
    assert received == {"stdout": f"{tmp_path} x lo\n".encode(), "stderr": b"e\n", "code": 7}


@pytest.mark.parametrize("own", ["", "ib0"])
def test_nccls_interface_is_the_nodes_or_the_users(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """It is that of the node's address, unless the user has set NCCL_SOCKET_IFNAME."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if own:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", own)
    received = run(keeper, "w", ["sh", "-c", "echo $NCCL_SOCKET_IFNAME"])
    assert received["stdout"].decode().strip() == (own or "lo")


def test_a_signal_reaches_the_worker_and_its_children(keeper: Keeper) -> None:
    """The code is minus the signal's number;
    a signal before the start keeps the worker from starting.
    """
    stream = keeper.run("w", ["sh", "-c", "echo up; sleep 60 & sleep 60"], {}, None)
    assert next(stream) == ("stdout", b"up\n")
    keeper.send("w", signal.SIGTERM)
    assert list(stream) == [("code", -signal.SIGTERM)]
    keeper.send("later", signal.SIGKILL)
    assert list(keeper.run("later", ["false"], {}, None)) == [("code", -signal.SIGTERM)]


def test_a_call_and_its_result_pass_by_files(keeper: Keeper) -> None:
    """The worker finds the call in a folder of its own, which is deleted at the end."""
    received = run(
        keeper,
        "w",
        ["sh", "-c", "cat $TRAINKIT_CALL/call $TRAINKIT_CALL/call > $TRAINKIT_CALL/result; env"],
        b"ab",
    )
    assert received["result"] == b"abab"
    (folder,) = [
        line
        for line in received["stdout"].decode().splitlines()
        if line.startswith("TRAINKIT_CALL=")
    ]
    assert not Path(folder.partition("=")[2]).exists()


def test_what_a_node_has_is_reported(keeper: Keeper, tmp_path: Path) -> None:
    """With this environment: trainkit, its Horovod;
    a file of the driver's is looked for in the worker's folder.
    """
    (tmp_path / "token").touch()
    facts = keeper.look(PYTHON, "token")
    assert (facts["trainkit"], facts["token"], facts["folder"]) == (True, True, str(tmp_path))
    assert "+trainkit" in facts["horovod"]
    assert keeper.look(PYTHON, "run/token")["token"] is False


def test_a_killed_keeper_leaves_no_worker(tmp_path: Path) -> None:
    """SIGKILL of the actor's process: the reaper ends the worker's group."""
    (tmp_path / "keep.py").write_text(
        "from pathlib import Path\nfrom trainkit.extensions.elastic import reaper\n"
        "from trainkit.extensions.ray.keeper import Keeper\n"
        "keeper = Keeper(Path(reaper.__file__).read_text(), None, '127.0.0.1')\n"
        "for item in keeper.run('w', ['sh', '-c', 'echo $$; exec sleep 60'], {}, None):\n"
        "    print(item[1].decode(), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "keep.py")],
        env=os.environ | PYTHON,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    worker = Path("/proc") / process.stdout.readline().strip()
    assert worker.exists()
    process.kill()
    process.communicate()
    end = time.monotonic() + 5
    while worker.exists() and (worker / "stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the worker outlived its keeper"
        time.sleep(0.01)
