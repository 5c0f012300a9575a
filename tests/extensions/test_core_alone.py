"""The core needs no extension: a copy of trainkit without the folder extensions/ trains,
validates and resumes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = (
    "conf=mlp",
    "run_dir=runs/mine",
    "trainer.limit_val_batches=2",
    "callbacks=checkpoint",
    "logger=csv",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, without extensions, and what ships with it."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(
        ROOT / "trainkit",
        folder / "trainkit",
        ignore=shutil.ignore_patterns("__pycache__", "extensions"),
    )
    for name in ("conf", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(
    core: Path, cwd: Path, *arguments: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a trainkit command of the copy."""
    command = [sys.executable, *launcher, "-m", "trainkit", *arguments]
    env = os.environ | {"PYTHONPATH": str(core)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_it_trains_resumes_and_validates_on_one_and_on_two_ranks(
    core: Path, tmp_path: Path
) -> None:
    """One process trains, two ranks resume and validate, and one resumes again,
    each at the step where the last one ended.
    """

    def fit(steps: int, *more: str, launcher: tuple[str, ...] = ()) -> str:
        done = run(
            core, tmp_path, "fit", *SMALL, f"trainer.max_steps={steps}", *more, launcher=launcher
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    fit(4)
    assert "at epoch 0, step 4" in fit(6, "ckpt_path=last", launcher=TORCHRUN)
    evaluated = run(
        core, tmp_path, "validate", "run_dir=runs/mine", "ckpt_path=last", launcher=TORCHRUN
    )
    assert evaluated.returncode == 0 and "val/loss" in evaluated.stdout, (
        evaluated.stdout + evaluated.stderr
    )
    assert "at epoch 0, step 6" in fit(8, "ckpt_path=last")


def test_what_extensions_bring_is_missing_there(core: Path, tmp_path: Path) -> None:
    """The copy is without them: its list is empty, and a command of theirs is unknown."""
    assert run(core, tmp_path, "extensions", "--json").stdout.strip() == "[]"
    serve = run(core, tmp_path, "serve", "runs/mine")
    assert serve.returncode == 2 and "'serve' is not a command." in serve.stderr
    engine = run(core, tmp_path, "fit", "conf=mlp", "engine=deepspeed")
    assert engine.returncode == 2 and "deepspeed" in engine.stderr
    url = run(core, tmp_path, "fit", *SMALL, "callbacks.checkpoint.dirpath=memory://there")
    assert url.returncode == 2 and "lacks the extension object_store" in url.stderr


def test_an_elastic_job_is_refused_there(core: Path, tmp_path: Path) -> None:
    """By horovodrun with trainkit's edits, and by the driver's own command."""
    pytest.importorskip("horovod")
    options = ("-np", "2", "--min-np", "1", "-H", "localhost:2")
    for module in ("horovod.runner.launch", "trainkit.launch.elastic"):
        done = subprocess.run(
            [sys.executable, "-m", module, *options, "true"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(core)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ConfigError.exit_code, done.stderr
        assert "lacks the extension 'elastic'" in done.stderr and "Traceback" not in done.stderr
