"""Secrets of a config never reach a file, a table or the terminal,
and later commands find them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Command

TASK = """
import trainkit
from tests.helpers.toy import Line, loader
class Secret(Line):
    def __init__(self, token="", url="", api_key="", fails=False):
        super().__init__()
        self.save_hyperparameters()
        assert url == "https://u:S3CRET-env@host", url
        self.fails = fails
    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ValueError(f"no access with {self.hparams.token}")
        return super().training_step(batch, batch_idx)
class Data(trainkit.DataModule):
    def train_dataloader(self): return loader(16)
    def val_dataloader(self): return loader(8)
"""
CONF = """
vars: {tok: '${oc.env:MY_TOKEN}'}
task: {_target_: mine.Secret, token: '${vars.tok}', url: 'https://u:${vars.tok}@host', api_key: literal-key}
data: {_target_: mine.Data}
trainer: {max_epochs: 1}
logger: {tensorboard: {_target_: trainkit.loggers.TensorBoardLogger}, jsonl: {_target_: trainkit.loggers.JSONLLogger}}
callbacks: {capsule: {_target_: trainkit.callbacks.CrashCapsule}}
"""
ENV = {"MY_TOKEN": "S3CRET-env", "PYTHONPATH": str(Path(__file__).parents[2])}
MORE = "run_dir=R trust=[mine,tests]"


def leaks(folder: Path) -> list[str]:
    """Return the files that hold a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    return [
        path.name
        for path in files
        if any(word in path.read_bytes() for word in (b"S3CRET-env", b"literal-", b"typed-one"))
    ]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a Task and its config."""
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(CONF)
    return tmp_path


def test_no_file_holds_a_secret_and_evaluation_resolves_it_again(
    project: Path, command: Command
) -> None:
    """From the environment it is read again; one that was typed must be given again, by its key."""
    done = command(f"python -m trainkit fit conf=mine {MORE}", **ENV)
    assert done.code == 0, done.text
    assert leaks(project / "R") == []
    done = command(f"python -m trainkit validate {MORE}", **ENV)
    assert done.code == 2
    assert "task.api_key is masked in the run's config.yaml" in done.err
    done = command(f"python -m trainkit validate {MORE} task.api_key=typed-one", **ENV)
    assert done.code == 0, done.text
    assert "S3CRET" not in done.text
    printed = command("python -m trainkit fit conf=mine --cfg job --resolve", **ENV).out
    assert "token: ${oc.env:MY_TOKEN}" in printed
    assert "literal-key" not in printed


def test_a_failed_run_holds_none_either(project: Path, command: Command) -> None:
    """state.json and a crash capsule are written from errors and arguments."""
    done = command(
        f"python -m trainkit fit conf=mine task.fails=true task.api_key=typed-one {MORE}", **ENV
    )
    assert done.code == 1
    assert list((project / "R/capsules").glob("step=*"))
    assert leaks(project / "R") == []
    assert "no access with ***" in (project / "R/state.json").read_text()
