"""A project from a widespread Lightning-and-Hydra template,
with imports and base classes changed and nothing else.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import trainkit
from tests.helpers.threads import ThreadEngine, World


class DigitsData(trainkit.DataModule):
    """Random digits that can be learnt, split as the template does."""

    def __init__(
        self, train_val_test_split: tuple[int, int, int] = (96, 32, 32), batch_size: int = 16
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train: Any = None

    @property
    def num_classes(self) -> int:
        """The number of digits."""
        return 10

    def setup(self, stage: str | None = None) -> None:
        """Split, once."""
        if self.data_train is None:
            generator = torch.Generator().manual_seed(42)
            targets = torch.randint(0, self.num_classes, (160,), generator=generator)
            noise = torch.randn(160, 10, generator=generator)
            digits = TensorDataset(nn.functional.one_hot(targets, 10) * 3.0 + noise, targets)
            self.data_train, self.data_val, self.data_test = random_split(
                dataset=digits,
                lengths=list(self.hparams.train_val_test_split),
                generator=torch.Generator().manual_seed(42),
            )

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training data."""
        return DataLoader(dataset=self.data_train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation data."""
        return DataLoader(dataset=self.data_val, batch_size=self.hparams.batch_size, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test data."""
        return DataLoader(dataset=self.data_test, batch_size=self.hparams.batch_size, shuffle=False)


class DigitsTask(trainkit.Task):
    """A classifier with a metric object for each value, and its best validation accuracy."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.train_loss, self.val_loss, self.test_loss = (
            torchmetrics.MeanMetric() for _ in range(3)
        )
        self.val_acc_best = torchmetrics.MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(x)

    def on_train_start(self) -> None:
        """Forget the sanity check."""
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, predictions and targets."""
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log the objects."""
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Nothing, as in the template."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the objects."""
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the best accuracy so far."""
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the objects."""
        loss, preds, targets = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and a schedule that monitors the validation."""
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        plan = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": plan}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_template_trains_and_tests(ranks: int, tmp_path: Path) -> None:
    """It learns; the best accuracy is that of the epochs;
    the best checkpoint is tested; ranks agree.
    """

    def work(engine: ThreadEngine) -> dict[str, float]:
        torch.manual_seed(1)
        task = DigitsTask(
            nn.Linear(10, 10),
            functools.partial(torch.optim.Adam, lr=0.05),
            functools.partial(
                torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=10
            ),
        )
        callbacks = [
            trainkit.ModelCheckpoint(
                dirpath=str(tmp_path / "checkpoints"), monitor="val/acc", mode="max", save_last=True
            ),
            trainkit.EarlyStopping(monitor="val/acc", patience=100, mode="max"),
        ]
        trainer = trainkit.Trainer(
            engine=engine,
            run_dir=str(tmp_path),
            callbacks=callbacks,
            min_epochs=1,
            max_epochs=6,
            check_val_every_n_epoch=1,
            deterministic=False,
            logger=False,
            enable_progress_bar=False,
        )
        data = DigitsData(batch_size=16 // ranks)
        trainer.fit(model=task, datamodule=data)
        found = dict(trainer.callback_metrics)
        assert trainer.early_stopping_callback.best_score == found["val/acc_best"]
        best = trainer.checkpoint_callback.best_model_path
        return found | trainer.test(model=task, datamodule=data, ckpt_path=best)

    results = World(ranks).run(work)
    assert all(found == pytest.approx(results[0]) for found in results)
    assert results[0]["train/acc"] > 0.8
    assert results[0]["val/acc_best"] >= results[0]["val/acc"] > 0.6
    assert 0 < results[0]["test/loss"] < 1.5
