"""flatten: a nested config as one table of plain values. Rows of two runs in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit import loggers
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers.rows import flatten


def test_nesting_becomes_dots_and_values_stay_plain() -> None:
    """Numbers, texts and booleans stay unchanged;
    lists and null become their JSON, other objects their text.
    """
    settings = {
        "seed": 0,
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.999], "fused": True},
        "task": {"net": {"width": 7}},
        "resume": None,
        "callbacks": {},
        "of": {1},
    }
    assert flatten(settings) == {
        "seed": 0,
        "optimizer.lr": 0.1,
        "optimizer.betas": "[0.9, 0.999]",
        "optimizer.fused": True,
        "task.net.width": 7,
        "resume": "null",
        "callbacks": "{}",
        "of": '"{1}"',
    }


@pytest.mark.parametrize(("name", "file"), [("CSV", "metrics.csv"), ("JSONL", "metrics.jsonl")])
def test_rows_of_another_run_are_not_lost(
    name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs whose folders have one name share a folder below save_dir: the earlier file is renamed,
    and reported. A resumed run, and a test after a fit, add rows.
    """

    def fit(folder: str, steps: int, ckpt_path: str | None = None) -> None:
        logger = getattr(loggers, f"{name}Logger")(str(tmp_path / "logs"), "exp")
        settings = {"logger": logger, "log_every_n_steps": 1, "max_steps": steps}
        trainer = quiet(
            tmp_path / folder / "seed0", callbacks=[ModelCheckpoint(save_last=True)], **settings
        )
        trainer.fit(Line(), loader(40), ckpt_path=ckpt_path)

    def rows(path: Path) -> int:
        return len(path.read_text().splitlines()) - (name == "CSV")

    own = tmp_path / "logs/exp/seed0" / file
    fit("a", 3)
    fit("a", 5, "last")
    assert rows(own) == 5
    assert "another run's" not in capsys.readouterr().out
    for count in (1, 2):
        fit("b" * count, 2)
        assert rows(own) == 2
        assert f"{file} was another run's, and is before-" in capsys.readouterr().out
        assert sorted(map(rows, own.parent.glob(f"before-*-{file}"))) == [2] * (count - 1) + [5]


@pytest.mark.parametrize("name", ["CSV", "JSONL"])
def test_a_resumed_run_that_repeats_all_rows_has_its_own_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of the steps after its checkpoint are repeated, and are no other run's."""
    second = str(tmp_path / "run/checkpoints/epoch=0-step=2")
    for ckpt_path in (None, second):
        logger = getattr(loggers, f"{name}Logger")(str(tmp_path / "logs"))
        keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
        settings = {"logger": logger, "log_every_n_steps": 3, "callbacks": [keep]}
        trainer = quiet(tmp_path / "run", max_steps=3, **settings)
        trainer.fit(Line(), loader(40), ckpt_path=ckpt_path)
    assert [path.name.partition(".")[0] for path in (tmp_path / "logs/run").iterdir()] == [
        "metrics"
    ]
    assert "another run's" not in capsys.readouterr().out
