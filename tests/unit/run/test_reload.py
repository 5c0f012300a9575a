"""trainer.reload_dataloaders_every_n_epochs:
loaders that are made again, in a fit and after resuming.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.api.datamodule import DataModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError


class Growing(DataModule):
    """Has more samples in later epochs, and notes when its loaders are made."""

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Return 8 samples, and 8 more for each epoch that has passed."""
        epoch = self.trainer.current_epoch
        self.made.append(("train", epoch))
        return loader(
            8 * (1 + epoch), self.batch_size if self.batch_size and epoch else 4, shuffle=True
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """Return as many samples as the epoch's number, and one."""
        self.made.append(("val", self.trainer.current_epoch))
        return loader(1 + self.trainer.current_epoch)


class Counting(Line):
    """Logs the number of validation samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count."""
        self.log("val/count", torch.tensor(float(len(batch[0]))), reduce_fx="sum")


def fit(
    folder: Path,
    data: DataModule,
    engine: Any = "auto",
    ckpt_path: str | None = None,
    **settings: Any,
) -> tuple[Tensor, Any]:
    """Return the weights and the history."""
    task = Counting()
    given = {
        "reload_dataloaders_every_n_epochs": 1,
        "max_epochs": 4,
        "num_sanity_val_steps": 0,
    } | settings
    return quiet(folder, engine=engine, **given).fit(
        task, datamodule=data, ckpt_path=ckpt_path
    ), weights(task)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("every", "epochs"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (0, [0])])
def test_loaders_are_made_again_before_each_nth_epoch(
    every: int, epochs: list[int], ranks: int, tmp_path: Path
) -> None:
    """Training and validation both; an epoch's steps are those of its data."""
    data = [Growing() for _ in range(ranks)]

    def work(engine: Any) -> Any:
        own = data.pop()
        history, _ = fit(tmp_path, own, engine, reload_dataloaders_every_n_epochs=every)
        return own.made, history

    for made, history in World(ranks).run(work):
        assert made == [(kind, epoch) for epoch in epochs for kind in ("train", "val")]
        of_epoch = [max(e for e in epochs if e <= epoch) for epoch in range(4)]
        assert [values["val/count"] for values in history] == [1 + e for e in of_epoch]
        steps = [0, *(values["step"] for values in history)]
        assert [b - a for a, b in zip(steps, steps[1:], strict=False)] == [
            2 * (1 + e) // ranks for e in of_epoch
        ]


def test_a_resumed_run_reads_the_data_of_its_epoch(tmp_path: Path) -> None:
    """Stopped inside the third epoch."""
    history, whole = fit(tmp_path / "whole", Growing())
    saving = {"callbacks": [ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)]}
    fit(tmp_path / "parts", Growing(), max_steps=8, **saving)
    data = Growing()
    resumed, parts = fit(tmp_path / "parts", data, ckpt_path="last", **saving)
    assert torch.equal(parts, whole)
    assert resumed == history
    assert data.made[:2] == [("train", 2), ("val", 2)]


def test_a_run_that_resumes_between_two_reloads_has_the_loaders_of_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are made once, as of the epoch in which they were made; nothing has changed."""
    every: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 2}
    _, whole = fit(tmp_path / "whole", Growing(), **every)
    keeper = ModelCheckpoint(every_n_train_steps=1)
    fit(tmp_path / "parts", Growing(), max_steps=13, callbacks=keeper, **every)
    data = Growing()
    capsys.readouterr()
    assert torch.equal(fit(tmp_path / "parts", data, ckpt_path="last", **every)[1], whole)
    assert data.made == [("train", 2), ("val", 2)]
    assert "Changed since" not in capsys.readouterr().out


def test_what_cannot_be_made_again(tmp_path: Path) -> None:
    """Loaders that were passed to fit; and another batch size is no data of the same run."""
    with pytest.raises(
        ConfigError,
        match=r"is 2, but the loaders were passed to fit .* of a DataModule, or of Line",
    ):
        quiet(tmp_path, reload_dataloaders_every_n_epochs=2).fit(Line(), loader(8))
    with pytest.raises(
        ConfigError,
        match="in epoch 1 train_dataloader.. returned batches of 8; before, they were of 4",
    ):
        fit(tmp_path, Growing(batch_size=8))
