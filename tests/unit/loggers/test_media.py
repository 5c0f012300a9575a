"""Pictures, figures, texts, tables,
sounds and histograms reach every logger that can store them.
"""

from __future__ import annotations

import csv
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet
from tests.helpers.wandb_file import records
from trainkit.api.callback import Callback
from trainkit.errors import TaskError
from trainkit.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger


class Shows(Line):
    """Logs one of each at the end of training."""

    def on_train_end(self) -> None:
        """Log."""
        self.log_image("seen/picture", torch.linspace(0, 1, 12).reshape(3, 2, 2), caption="a ramp")
        self.log_text("note", "It *works*.")
        self.log_table("worst", ["sample", "loss"], [[3, torch.tensor(0.5)], [7, 0.25]])
        self.log_audio("tone", torch.sin(torch.arange(800) / 5), 8000)
        self.log_histogram("weights", self.model.weight)


def fit(tmp_path: Path, logger: Any, task: Line | None = None, **settings: Any) -> Path:
    """Train with a logger; return the folder."""
    quiet(tmp_path, logger=logger, **settings).fit(task or Shows(), loader(8))
    return tmp_path


def test_the_csv_logger_writes_files(tmp_path: Path) -> None:
    """Each thing is a file in media/ that other programs read."""
    folder = fit(tmp_path, CSVLogger()) / "media"
    with Image.open(folder / "seen_picture-step=2.png") as picture:
        assert np.asarray(picture)[:, :, 0].tolist() == [[0, 23], [46, 70]]
    assert (folder / "note-step=2.md").read_text() == "It *works*."
    with (folder / "worst-step=2.csv").open() as file:
        assert list(csv.reader(file)) == [["sample", "loss"], ["3", "0.5"], ["7", "0.25"]]
    with wave.open(str(folder / "tone-step=2.wav")) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (8000, 800)
    assert sum(json.loads((folder / "weights-step=2.json").read_text())["counts"]) == 3


def test_tensorboard_has_all(tmp_path: Path) -> None:
    """The records are of TensorBoard's own kinds."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(fit(tmp_path, TensorBoardLogger()) / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert tags["images"] == ["seen/picture"]
    assert tags["audio"] == ["tone"]
    assert tags["histograms"] == ["weights"]
    assert {"note/text_summary", "worst/text_summary"} <= set(tags["tensors"])


def test_mlflow_and_wandb_store_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow gets files, W&B its own objects."""
    for name, value in {
        "MODE": "offline",
        "SILENT": "true",
        "DATA_DIR": "o",
        "CACHE_DIR": "o",
        "CONFIG_DIR": "o",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / value) if value == "o" else value)
    fit(tmp_path / "m", MLFlowLogger())
    stored = {path.name for path in (tmp_path / "m" / "mlruns").rglob("*-step=2.*")}
    assert stored == {f"{name}-step=2.{end}" for name, end in MEDIA.items()}
    fit(tmp_path / "w", WandbLogger())
    records(tmp_path / "w")  # waits until W&B's own process has written all
    names = {
        path.name.split("_")[0] for path in (tmp_path / "w").rglob("media/**/*") if path.is_file()
    }
    assert {"seen", "picture", "tone", "note", "worst"} & names


MEDIA = {"seen_picture": "png", "note": "md", "worst": "csv", "tone": "wav", "weights": "json"}


def test_a_callback_and_a_figure(tmp_path: Path) -> None:
    """A callback logs as a Task does; a figure of matplotlib is drawn."""

    class Canvas:
        def draw(self) -> None:
            self.pixels = np.zeros((4, 5, 4), dtype=np.uint8)

        def buffer_rgba(self) -> Any:
            return self.pixels

    class Draws(Callback):
        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            self.log_figure("figure", type("Figure", (), {"canvas": Canvas()})())

    folder = fit(tmp_path, CSVLogger(), Line(), callbacks=Draws())
    with Image.open(folder / "media" / "figure-step=2.png") as picture:
        assert picture.size == (5, 4)


def test_only_rank_0s_are_stored(tmp_path: Path) -> None:
    """Other ranks make nothing."""
    made: list[int] = []

    class Ranks(Line):
        def on_train_end(self) -> None:
            rank = self.trainer.global_rank

            class Text:
                def __str__(self) -> str:
                    made.append(rank)
                    return "text"

            self.log_text("note", Text())  # type: ignore[arg-type]

    World(2).run(lambda engine: fit(tmp_path, CSVLogger(), Ranks(), engine=engine))
    assert made == [0]


def test_without_a_logger_that_can_it_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is stored nowhere is said, with what to do."""
    fit(tmp_path, False)
    assert (
        capsys.readouterr().out.count("is not stored: no logger of this run can. Add logger=csv")
        == 1
    )


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (
            lambda task: task.log_image("x", torch.zeros(2, 3, 4, 5)),
            r"log_image\('x', \.\.\.\) got shape \[2, 3, 4, 5\]",
        ),
        (
            lambda task: task.log_table("x", ["a"], [[1, 2]]),
            r"row 0 has 2 cells, and there are 1 columns",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused(work: Any, words: str, tmp_path: Path) -> None:
    """A wrong shape is named."""

    class Wrong(Line):
        def on_train_start(self) -> None:
            work(self)

    with pytest.raises(TaskError, match=words):
        fit(tmp_path, CSVLogger(), Wrong())


def test_outside_of_a_run_it_is_refused() -> None:
    """A callback that nothing runs has no place for a picture."""
    with pytest.raises(TaskError, match="Callback logs media, but no Trainer runs it yet"):
        Callback().log_text("a", "b")
