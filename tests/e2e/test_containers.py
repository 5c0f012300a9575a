"""The CPU image, built by buildah from the page's first command: its user, its doctor, fits on two ranks.

TRAINKIT_BUILD_OPTIONS adds words to `buildah build`, where no registry or no index of torch can be reached:

    BUILDAH_ISOLATION=chroot \\
    TRAINKIT_BUILD_OPTIONS="--network host --build-arg BASE=localhost/bookworm --build-arg TORCH_INDEX=" pytest -m slow ...
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture.test_containers import DOCKERFILE, PAGE, arguments
from tests.helpers.pages import ROOT, blocks

OPTIONS = shlex.split(os.environ.get("TRAINKIT_BUILD_OPTIONS", ""))
TAG = "localhost/trainkit-test:cpu"
Inside = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = [pytest.mark.parallel, pytest.mark.timeout(3600)]


def buildah(*words: str) -> subprocess.CompletedProcess[str]:
    """Run buildah."""
    return subprocess.run(
        ["buildah", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """Build the image; a machine that cannot skips the tests, and says why."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed here: apt-get install buildah")
    given = [word.removeprefix("BASE=") for word in OPTIONS if word.startswith("BASE=")]
    base = given[0] if given else arguments(DOCKERFILE)["BASE"]
    container = buildah("from", base)
    if container.returncode:
        pytest.skip(
            f"the base image {base} is not here, and cannot be pulled:"
            f" {container.stderr.strip()[-300:]}"
        )
    buildah("rm", container.stdout.strip())
    command = next(line for block in blocks(PAGE, "Containers") for line in block.commands)
    docker, build, *words = shlex.split(command)
    assert (docker, build, words[-1]) == ("docker", "build", ".")
    done = buildah("build", *OPTIONS, "--layers", *words[:-1], "-t", TAG, ".")
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    yield TAG
    buildah("rmi", TAG)


@pytest.fixture
def inside(image: str, tmp_path: Path) -> Iterator[Inside]:
    """Return a function that runs a line in a container,
    whose /workspace/runs is the test's folder.
    """
    tmp_path.chmod(0o777)  # the image's user is none of this machine
    container = buildah("from", image).stdout.strip()
    yield lambda line, *options: buildah(
        "run", *options, "-v", f"{tmp_path}:/workspace/runs", container, "--", "sh", "-c", line
    )
    buildah("rm", container)


def test_the_user_is_not_root_and_has_no_compiler(inside: Inside) -> None:
    """It can write where it starts, but not what is installed; caches and keys are not there."""
    assert inside("id -u; pwd; touch mine && echo written").stdout.split() == [
        "10001",
        "/workspace",
        "written",
    ]
    assert inside("for name in g++ gcc make nvcc cmake; do command -v $name; done").stdout == ""
    assert inside("touch /opt/trainkit/mine").returncode != 0
    assert inside("ls -A /home/trainkit /tmp /var/lib/apt/lists | grep -i cache").stdout == ""
    assert inside("ls /etc/ssh").stdout.count("ssh_host") == 0


def test_the_doctor_finds_nothing_wrong(inside: Inside) -> None:
    """In a container, beside the build's own look."""
    done = inside("python -m trainkit doctor")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("start", ["horovodrun -np 2 python", "torchrun --nproc-per-node 2"])
def test_two_ranks_train_into_a_mounted_folder(inside: Inside, tmp_path: Path, start: str) -> None:
    """With the recipes and configs of the image, in a folder that holds nothing."""
    done = inside(f"{start} -m trainkit fit conf=mlp trainer.max_steps=2 run_dir=runs/mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "mine" / "metrics.csv").is_file()


def test_a_user_of_the_hosts_trains_in_it(inside: Inside, tmp_path: Path) -> None:
    """As under `docker run --user`: one that the image does not know, whose files are its own."""
    done = inside(
        "horovodrun -np 2 python -m trainkit fit conf=mlp trainer.max_steps=2 run_dir=runs/mine",
        "--user",
        "12345:12345",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "mine" / "metrics.csv").stat().st_uid == 12345


def test_kubernetes_gets_a_command_that_runs_here(inside: Inside) -> None:
    """The words of a pod's container are found in the image, and its manifest is printed there."""
    words = (
        "conf=mlp launcher=kubernetes launcher.image=trainkit:cpu 'launcher.volumes={runs: /runs}'"
        " run_dir=/runs/mine"
    )
    done = inside(f"python -m trainkit fit {words} launcher.nodes=2 launcher.dry_run=true")
    assert done.returncode == 0 and "- torchrun" in done.stdout, done.stdout + done.stderr
    assert (
        inside("for name in torchrun horovodrun ssh; do command -v $name; done").stdout.count("\n")
        == 3
    )
