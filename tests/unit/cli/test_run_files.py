"""A run's config and state in its folder:
a refused start leaves them alone, and a new run keeps the earlier one's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from trainkit.checkpoint.format import load_training, verify
from trainkit.cli.run import main
from trainkit.run.progress_file import read_progress
from trainkit.run.state import STATE

FIT = [
    "conf=mlp",
    "callbacks=checkpoint",
    "logger=csv",
    "trainer.limit_val_batches=1",
    "run_dir=run",
]


def width(run: Path) -> int:
    """Return the width of the model in a run's config."""
    found: int = yaml.safe_load((run / "config.yaml").read_text())["task"]["model"]["width"]
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps."""
    monkeypatch.chdir(tmp_path)
    assert main("fit", [*FIT, "trainer.max_steps=2", "+task.model.width=16"]) == 0
    return tmp_path / "run"


def test_a_refused_resume_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's config and state are those of its own start,
    so that it can still be resumed with them.
    """
    state = (run / STATE).read_text()
    assert main("fit", [*FIT, "trainer.max_steps=4", "+task.model.width=32", "ckpt_path=last"]) == 1
    assert "do not fit this model" in capsys.readouterr().err
    assert width(run) == 16 and (run / STATE).read_text() == state
    assert main("fit", ["run_dir=run", "ckpt_path=last", "trainer.max_steps=4"]) == 0
    assert (run / "checkpoints" / "epoch=0-step=4").is_dir()


def test_a_run_begins_at_anothers_checkpoint_until_it_has_its_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """resume=auto ckpt_path=PATH, for jobs that are started again: PATH is read while the run has no
    checkpoint, and must exist then.
    """
    other = f"ckpt_path={run}/checkpoints/last"
    line = [*FIT[:-1], "run_dir=new", "resume=auto", other, "+task.model.width=16"]
    assert main("fit", [*line, "trainer.max_steps=3"]) == 0
    run.rename(tmp_path / "gone")
    assert main("fit", [*line, "trainer.max_steps=4"]) == 0
    progress = read_progress(tmp_path / "new")
    assert progress is not None
    assert [(start.how, start.step) for start in progress.starts] == [("resume", 2), ("resume", 3)]
    assert main("fit", [*line, "trainer.max_steps=4", "run_dir=third"]) == 2
    assert f"ckpt_path is '{run}/checkpoints/last'; it must be" in capsys.readouterr().err


def test_an_earlier_run_keeps_its_config(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is set aside with its config and state, and the message has the words that resume it."""
    assert main("fit", [*FIT, "trainer.max_steps=1", "+task.model.width=32"]) == 0
    (before,) = run.glob("before-*")
    assert (width(run), width(before)) == (32, 16) and (before / STATE).is_file()
    words = f"run_dir=run/{before.name} ckpt_path=last"
    assert f"To resume that one: {words}" in capsys.readouterr().out
    assert main("fit", [*words.split(), "trainer.max_steps=3"]) == 0
    assert (before / "checkpoints" / "epoch=0-step=3").is_dir()


def test_a_run_that_begins_at_anothers_checkpoint_is_not_mixed_with_an_earlier_one(
    run: Path, tmp_path: Path
) -> None:
    """The same command again in the same folder: the first try's files are set aside whole, and
    none of its checkpoints is taken for the second one's. So with a run that was set aside itself.
    """
    policy = ["callbacks.checkpoint.filename=model", "callbacks.checkpoint.monitor=val/loss"]
    line = [
        *FIT[:-1],
        "+task.model.width=16",
        "run_dir=new",
        *policy,
        "ckpt_path=run/checkpoints/last",
    ]
    new = tmp_path / "new"
    assert main("fit", [*line, "trainer.max_steps=4"]) == 0
    rows = (new / "metrics.csv").read_text()
    assert main("fit", [*line, "trainer.max_steps=3"]) == 0
    (before,) = new.glob("before-*")
    assert (before / "metrics.csv").read_text() == rows != (new / "metrics.csv").read_text()
    assert width(new) == width(before) == 16
    last = new / "checkpoints" / "last"
    assert verify(last)["global_step"] == 3
    (policy_state,) = (
        state for key, state in load_training(last)["callbacks"].items() if "ModelCheckpoint" in key
    )
    assert [*policy_state["kept"]] == ["model"]
    line[-1] = f"ckpt_path={before}/checkpoints/last"
    assert main("fit", [*line, "trainer.max_steps=5"]) == 0
    assert len([*new.glob("before-*")]) == 2


def test_a_run_that_resumes_from_a_copy_of_its_checkpoint_is_the_same_run(
    run: Path, tmp_path: Path
) -> None:
    """As one of Ray's, of Trainer.save_checkpoint, or by another path to the folder."""
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(run / "checkpoints" / "last", tmp_path / "elsewhere" / "copy")
    (tmp_path / "link").symlink_to("run")
    line = [*FIT[:-1], "+task.model.width=16"]
    for steps, folder, path in ((3, "run", "elsewhere/copy"), (4, "link", "run/checkpoints/last")):
        words = [f"run_dir={folder}", f"ckpt_path={path}", f"trainer.max_steps={steps}"]
        assert main("fit", [*line, *words]) == 0
    assert not [*run.glob("before-*")]


def test_a_start_that_fails_leaves_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new folder it is written before the model is made, with the error in the state."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"no weights")
    assert (
        main(
            "fit",
            [
                *FIT,
                "trainer.max_steps=1",
                "+task.model.width=32",
                "init_weights=damaged.safetensors",
            ],
        )
        == 1
    )
    assert width(tmp_path / "run") == 32 and "failed" in (tmp_path / "run" / STATE).read_text()


def test_an_illegal_request_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is seen only once the run's folder is there, or of a checkpoint that is not there;
    a folder that was there stays.
    """
    monkeypatch.chdir(tmp_path)
    words = [*FIT, "trainer.max_steps=1", "trainer.rank_shares=[1,2]"]
    assert main("fit", words) == 2
    assert "trainer.rank_shares is [1, 2]" in capsys.readouterr().err
    assert main("fit", [*words[:-1], "run_dir=runs/new/one", words[-1]]) == 2
    for missing in ("nowhere", "last", "best"):
        assert main("fit", [*words[:-1], f"ckpt_path={missing}"]) == 2
        assert f"ckpt_path is '{missing}'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert main("fit", words) == 2
    assert {"notes.txt", STATE} <= {path.name for path in (tmp_path / "run").iterdir()}
