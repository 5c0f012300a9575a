"""What the pods of launcher=kubernetes run:
here two processes in place of two pods, one of which is lost and made again.
"""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.faults.jobs import free_port
from tests.helpers.launching import BIN, Command, run_command
from tests.parallel.starts import ROOT

pytestmark = pytest.mark.parallel

LINE = (
    "python -m trainkit fit conf=mlp launcher=kubernetes launcher.image=trainkit:1 launcher.nodes=2"
    " launcher.dry_run=true 'launcher.volumes={runs: %s}' run_dir=%s/runs/mine"
    " callbacks.checkpoint.every_n_train_steps=5 trainer.max_epochs=2"
)


def pods_command(folder: Path) -> list[str]:
    """Return the command of each pod, which meet on this host."""
    done = run_command(LINE % (folder, folder), folder, PYTHONPATH=str(ROOT))
    assert done.code == 0, done.text
    service, job = yaml.safe_load_all(done.out)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    own = job["spec"]["template"]["spec"]["containers"][0]
    return [word.replace("mlp-0.mlp:29400", f"127.0.0.1:{free_port()}") for word in own["command"]]


class Pods:
    """Two processes in place of two pods, and what the controller of a Job does: a pod that fails
    is made again.

    Args:
        command: of each.
        folder: in which they run.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        env = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._command, self._env, self._folder = command, env, folder
        self.running = [self._start(index) for index in (0, 1)]
        self.made_again: list[int] = []

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        at = self._command.index("-m")  # on one host both could take the endpoint for their own
        command = [*self._command[:at], f"--rdzv-conf=is_host={index == 0}", *self._command[at:]]
        with (self._folder / f"pod{index}").open("ab") as out:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def lose(self, index: int) -> None:
        """Kill all of a pod, as the loss of its node does; ranks have groups of their own."""
        pod = self.running[index]
        children = subprocess.run(
            ["pgrep", "-P", str(pod.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        for pid in (pod.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pod.wait()

    def finish(self, limit: float) -> None:
        """Make pods again until both have ended well."""
        while [pod.poll() for pod in self.running] != [0, 0]:
            assert time.monotonic() < limit and len(self.made_again) < 6, self.output()[-4000:]
            for index, pod in enumerate(self.running):
                if pod.poll():
                    self.made_again.append(index)
                    self.running[index] = self._start(index)
            time.sleep(0.2)

    def output(self) -> str:
        """Return what both have printed."""
        return "".join((self._folder / f"pod{index}").read_text() for index in (0, 1))


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_pod_is_made_again_and_the_run_resumes(
    lost: int, command: Command, tmp_path: Path
) -> None:
    """Both ranks start again from the last checkpoint, and end as a run does that lost nothing;
    also if pod 0 is lost, where they meet."""
    run, limit = tmp_path / "runs" / "mine", time.monotonic() + 280
    pods = Pods(pods_command(tmp_path), tmp_path)
    try:
        while not (run / "checkpoints" / "last").exists():
            assert time.monotonic() < limit, pods.output()
            time.sleep(0.1)
        pods.lose(lost)
        pods.finish(limit)
    finally:
        for index in (0, 1):
            pods.lose(index)
    assert lost in pods.made_again and "resumed        runs/mine/checkpoints" in pods.output(), (
        pods.output()
    )
    plain = "trainer.max_epochs=2 callbacks.checkpoint.every_n_train_steps=5 run_dir=plain"
    done = command(
        f"torchrun --nproc-per-node 2 -m trainkit fit conf=mlp {plain}", OMP_NUM_THREADS="1"
    )
    assert done.code == 0, done.text
    rows = [
        [*csv.DictReader((folder / "metrics.csv").read_text().splitlines())]
        for folder in (run, tmp_path / "plain")
    ]
    accuracies = [[row["val/acc"] for row in found if row["val/acc"]] for found in rows]
    assert accuracies[0] == accuracies[1] and len(accuracies[0]) == 2
