"""Image classification: any model that maps images [B, 3, H, W] to logits [B, num_classes]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from trainkit.optim import decay_groups
from trainkit.report.classification.results import ClassificationResults


class ImageClassifier(trainkit.Task):
    """Cross-entropy with label smoothing.

    Args:
        model: the network.
        optimizer: makes an optimizer from parameter groups.
        lr: makes a schedule from the optimizer and the number of steps of the run; None for a constant rate.
        label_smoothing: share of the target that goes to all classes (Szegedy et al. 2016, section 7).
        no_weight_decay: kinds of parameters without weight decay: norm, bias, embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer, self.lr, self.label_smoothing = optimizer, lr, label_smoothing
        self.no_weight_decay = no_weight_decay

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val/loss", functional.cross_entropy(logits, labels))
        self.log("val/acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("test/loss", functional.cross_entropy(logits, labels))
        self.log("test/acc", (logits.argmax(1) == labels).float().mean())
        self.results.add(images, logits, labels, self.trainer.evaluator.sample_indices())

    def on_test_start(self) -> None:
        self.results = ClassificationResults()

    def on_test_end(self) -> None:
        """Leave a page: confusion, scores by class, calibration, the worst samples."""
        self.results.leave_page(self.trainer)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(decay_groups(self.model, no_weight_decay=self.no_weight_decay))
        if self.lr is None:
            return optimizer
        schedule = self.lr(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
