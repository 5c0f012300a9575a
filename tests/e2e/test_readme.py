"""Every command and every piece of code in the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.test_bad_input import write_images
from tests.helpers.launching import Command, run_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICK = " trainer.max_steps=2 trainer.limit_val_batches=1 data.batch_size=2"
SMALL_FOLDER = " data.num_classes=2 data.image_size=32 data.batch_size=2 trainer.max_steps=2 data.num_workers=1"


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Return the README's commands without their comments."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


MADE = [line for line in commands() if line.startswith("make ")]
TYPED = [line for line in commands() if not line.startswith("make ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and with runs to resume from."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (folder / "hosts.sh").chmod(0o755)
    write_images(folder)
    (folder / "my.txt").write_text("to be or not to be\n" * 400)
    recorded = " callbacks=timeline callbacks.timeline.start_step=0 callbacks.timeline.num_steps=2"
    poisoned = " 'callbacks=[capsule,faults,checkpoint]' 'callbacks.faults.faults=[{do: nan, step: 20}]' trainer.max_epochs=1"
    poisoned += " callbacks.checkpoint.every_n_train_steps=10"
    small = f"conf=resnet50{QUICK}"
    text = f"conf=gpt data.file=my.txt run_dir=runs/text{QUICK}"
    for run in (
        text,
        f"{small} run_dir=runs/mine",
        f"{small} run_dir=runs/seen{recorded}",
        f"conf=mlp run_dir=runs/nan{poisoned}",
    ):
        done = run_command(f"python -m trainkit fit {run}", folder)
        assert done.code == 0, done.text
    return folder


def test_ci_runs_what_the_readme_starts_with() -> None:
    """The README's make commands are those of .ci/run."""
    assert sorted(MADE) == ["make test", "make train"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f"\n{line}" in ci for line in MADE)


def test_the_readme_has_its_commands() -> None:
    """The tests below see the README's commands."""
    assert len(TYPED) >= 11


@pytest.mark.parallel
@pytest.mark.parametrize("line", TYPED)
def test_a_command_of_the_readme_runs(line: str, place: Path) -> None:
    """A command exits with 0; training commands are cut to two steps and small images."""
    words = line.replace("data.root=/data/imagenet", f"data.root={place / 'images'}").replace("max_epochs=90", "max_epochs=1")
    if "imagefolder" in words:
        words += SMALL_FOLDER
    elif " scaling " in words:
        words += " steps=2 data.batch_size=2"
    elif "check-resume" in words:
        words = words.replace("kill_at=17", "kill_at=3 steps=4")
    elif "faults" in words:
        words = words.replace("max_epochs=60", "max_epochs=2")
    elif " fit " in words and "--" not in words.split("trainkit", 1)[1]:
        words += QUICK.replace("max_steps=2", "max_steps=4") if "ckpt_path" in words else QUICK
        words += " callbacks.timeline.start_step=0" * ("callbacks=timeline" in words)
    elif " validate " in words:
        words += " trainer.limit_val_batches=1"
    done = run_command(words, place)
    assert done.code == 0, f"{words}\n{done.text}"


@pytest.mark.parallel
@pytest.mark.parametrize("launcher", ["python", "horovodrun -np 2 python"])
def test_the_script_of_the_readme_runs(launcher: str, command: Command, tmp_path: Path) -> None:
    """The README's own task trains as a script, alone and under horovodrun."""
    code, _ = blocks("python")
    (tmp_path / "mine.py").write_text(code)
    done = command(f"{launcher} mine.py")
    assert done.code == 0, done.text
    assert (tmp_path / "runs" / "mine" / "metrics.csv").is_file()
    assert "epoch 3/3" in done.out
    assert "train/loss" in done.out


@pytest.mark.parallel
def test_the_loop_of_the_readme_runs_and_resumes(command: Command, tmp_path: Path) -> None:
    """The README's loop by hand trains on 2 ranks, and finds its run again."""
    _, code = blocks("python")
    (tmp_path / "by_hand.py").write_text(code)
    first = command("horovodrun -np 2 python by_hand.py")
    assert first.code == 0, first.text
    assert first.out.count("epoch 3/3") == 1
    again = command("python by_hand.py")
    assert again.code == 0, again.text
    assert "resumed" in again.out


def test_the_config_of_the_readme_runs(command: Command, tmp_path: Path) -> None:
    """The README's config finds the task and data in the current folder."""
    (code, _), (conf,) = blocks("python"), blocks("yaml")
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(conf)
    done = command("python -m trainkit fit conf=mine")
    assert done.code == 0, done.text
    assert done.out.count("epoch 3/3") == 1  # to import the script is not to run it
