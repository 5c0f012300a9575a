"""Hosts that do not share the run's folder, under a real horovodrun:
one is a mount namespace with another disk there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.faults.jobs import ROOT, wait_for
from tests.helpers.launching import Done, run_command

_TRY = subprocess.run(
    ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"],
    capture_output=True,
    text=True,
    check=False,
)
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(
        _TRY.returncode != 0, reason=f"mount namespaces are not allowed here: {_TRY.stderr.strip()}"
    ),
]

# A worker: on the second host `runs` is another disk.
HOST = f"""#!/bin/sh
[ "$HOROVOD_HOSTNAME" = 127.0.0.1 ] || exec {sys.executable} -m trainkit "$@"
exec unshare -m sh -c 'mount -t tmpfs none runs && exec {sys.executable} -m trainkit "$@"' host "$@"
"""
TASK = """
import time
from pathlib import Path

from tests.helpers.toy import Line, loader


class Patient(Line):
    def training_step(self, batch, batch_idx):
        if Path("enough").exists():
            self.trainer.should_stop = True
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return loader(64)
"""
CONF = "defaults: [_base, _self_]\ntask: {_target_: patient.Patient}\ntrainer: {max_epochs: 1}\n"
FIT = "./host.sh fit conf=patient run_dir=runs/mine"
NOT_SEEN = "runs/mine', and 127.0.0.1 does not see it"


def job(folder: Path, options: str, words: str = "") -> Done:
    """Run a fit on hosts of which one has a disk of its own."""
    (folder / "runs").mkdir()
    (folder / "conf").mkdir()
    (folder / "conf" / "patient.yaml").write_text(CONF)
    (folder / "patient.py").write_text(TASK)
    (folder / "host.sh").write_text(HOST)
    (folder / "host.sh").chmod(0o755)
    return run_command(
        f"horovodrun --gloo {options} {FIT} {words}",
        folder,
        120,
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
    )


def test_fixed_ranks_train_and_the_host_is_named(tmp_path: Path) -> None:
    """Rank 0 alone writes: the fit ends well, and says on which host its files are."""
    done = job(tmp_path, "-np 2 -H localhost:1,127.0.0.1:1")
    assert done.code == 0, done.text
    assert done.text.count(f"{NOT_SEEN}: the run's files are on localhost alone") == 1, done.text


def test_an_elastic_job_does_not_start(tmp_path: Path) -> None:
    """Rank 0 could be on the other host later:
    exit code 2, before training, and nothing is left.
    """
    done = job(tmp_path, "-np 2 --min-np 1 -H localhost:1,127.0.0.1:1", "callbacks=elastic")
    assert done.code == 2, done.text
    either = (
        r"runs/mine', and (localhost|127.0.0.1) does not see it: it is not shared between the"
        r" hosts.*=s3://"
    )
    assert len(re.findall(either, done.text)) == 1, done.text  # the first worker to come is rank 0
    assert list((tmp_path / "runs").iterdir()) == [], done.text


def test_a_host_that_comes_without_the_folder_is_left_out(tmp_path: Path) -> None:
    """Its worker ends with the reason; the ranks that train continue, and the job ends well."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    (tmp_path / "log").touch()
    come = f"{{do: add_host, step: 5, host: '127.0.0.1:1', hosts_file: '{hosts}'}}"
    words = (
        f"callbacks=[elastic,faults] 'callbacks.faults.faults=[{come}]' trainer.max_epochs=2000"
        " 2>log"
    )

    def end() -> None:
        wait_for(
            lambda: "ended with exit code 2" in (tmp_path / "log").read_text(),
            "the end of the worker that came",
            100,
        )
        (tmp_path / "enough").touch()

    watch = threading.Thread(target=end)
    watch.start()
    done = job(
        tmp_path, f"-np 1 --min-np 1 --max-np 2 --host-discovery-script 'cat {hosts}'", words
    )
    watch.join()
    text = (tmp_path / "log").read_text()
    assert done.code == 0, text
    assert (
        NOT_SEEN in text and "127.0.0.1, slot 0) ended with exit code 2; 1 rank continues" in text
    ), text
