"""Image classification: any model that maps images [B, 3, H, W] to logits [B, num_classes]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from recipes.augment import Mix, as_given
from recipes.models import check_pixels, image_model, other_pixels
from recipes.schedule import with_schedule
from trainkit.arguments import Fraction, PositiveInt
from trainkit.errors import ConfigError
from trainkit.optim import decay_groups

# a mixed image shows the classes of more than this share (timm's bce_target_thresh of these
# recipes)
_PRESENT = 0.2


class ImageClassifier(trainkit.Task):
    """Cross-entropy, or binary cross-entropy of each class; on images that may be mixed in pairs.
    `val/loss` is cross-entropy.

    Args:
        model: the network; or a name, for `image_model` of recipes/models.py.
        optimizer: makes an optimizer from parameter groups.
        lr: makes a schedule from the optimizer and the number of steps of the run; None for a
            constant rate.
        label_smoothing: share of the target that goes to all classes (Szegedy et al. 2016, section
            7).
        no_weight_decay: kinds of parameters without weight decay: norm, bias, embedding.
        num_classes: number of logits, of a model by name.
        weights: pretrained ones by name, as IMAGENET1K_V2, of a model by name; None for random
            ones.
        model_options: further arguments of a model by name.
        mix: mixes the images of a training batch.
        loss: cross_entropy; or bce: each class is present or not (Wightman et al. 2021, section
            3.1); the sum over classes.
        log_train_acc: log train/acc; of a mixed image it is the predicted class's share.
    """

    batch_shape = "images [B, 3, H, W] and labels [B]"

    def __init__(
        self,
        model: nn.Module | str,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        label_smoothing: Fraction = 0.0,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        num_classes: PositiveInt | None = None,
        weights: str | None = None,
        model_options: dict[str, Any] | None = None,
        mix: Mix | None = None,
        loss: Literal["cross_entropy", "bce"] = "cross_entropy",
        log_train_acc: bool = False,
    ) -> None:
        super().__init__()
        self.model = _network(model, num_classes, weights, model_options)
        self.optimizer, self.lr, self.label_smoothing = optimizer, lr, label_smoothing
        self.no_weight_decay = no_weight_decay
        self.mix = as_given("task.mix", mix)
        self.loss = loss
        self.log_train_acc = log_train_acc
        self._has_compared = False

    def on_fit_start(self) -> None:
        """Compare the data's pixels with the model's, before the first step fails at them."""
        check_pixels(self.model, self.trainer.datamodule)
        self._compare_pixels()

    def on_validation_start(self) -> None:
        self._compare_pixels()

    def _compare_pixels(self) -> None:
        """Say once if pretrained weights are for other pixels than the data's. Those of a checkpoint
        were trained on the data's.
        """
        line = other_pixels(self.model, self.trainer.datamodule)
        begins = self.trainer.checkpoints.resumed_from is None
        if line is not None and begins and not self._has_compared:
            self.trainer.say(line)
        self._has_compared = True

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        partner, share = None, 1.0
        if self.mix is not None:
            images, partner, share = self.mix(images, self.trainer.options.seed, self.global_step)
        logits = self(images)
        if partner is not None or self.loss == "bce":
            targets = functional.one_hot(targets, logits.shape[1]).to(logits.dtype)
        if partner is not None:
            targets = targets.lerp(targets[partner], 1 - share)
        loss = self._loss(logits, targets)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        if self.log_train_acc:
            chosen = logits.argmax(1)
            right = (
                (chosen == targets).float()
                if targets.dim() == 1
                else targets.gather(1, chosen[:, None])
            )
            self.log("train/acc", right.mean(), on_step=False, on_epoch=True)
        return loss

    def _loss(self, logits_BK: Tensor, targets: Tensor) -> Tensor:
        if self.loss == "cross_entropy":
            return functional.cross_entropy(
                logits_BK, targets, label_smoothing=self.label_smoothing
            )
        present_BK = (targets > _PRESENT).to(logits_BK.dtype)
        smooth_BK = (
            present_BK * (1 - self.label_smoothing) + self.label_smoothing / logits_BK.shape[1]
        )
        return functional.binary_cross_entropy_with_logits(
            logits_BK, smooth_BK, reduction="sum"
        ) / len(logits_BK)

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
        self._compare_pixels()
        # of an extension, which training does not need
        from trainkit.extensions.reports.classification.results import ClassificationResults

        self.results = ClassificationResults()

    def on_test_end(self) -> None:
        """Leave a page: confusion, scores by class, calibration, the worst samples."""
        self.results.leave_page(self.trainer)

    def configure_optimizers(self) -> Any:
        return with_schedule(
            self,
            self.optimizer(decay_groups(self.model, no_weight_decay=self.no_weight_decay)),
            self.lr,
        )


def _network(
    model: nn.Module | str,
    num_classes: int | None,
    weights: str | None,
    options: dict[str, Any] | None,
) -> nn.Module:
    if isinstance(model, str):
        if num_classes is None:
            raise ConfigError(
                f"task.model is '{model}', and task.num_classes is missing: the number of logits."
            )
        return image_model(model, num_classes, weights, options)
    if weights or options:
        key, kind = "weights" if weights else "model_options", type(model).__name__
        raise ConfigError(
            f"task.{key} is for a model by name, as task.model=resnet50, and task.model is an"
            f" object ({kind})."
        )
    return model
