"""torchvision's reference training for classification, and the same with trainkit:
its groups, schedule, mixup and EMA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision.transforms import v2

import trainkit

epochs, batch_size, classes = 6, 8, 4
lr, momentum, wd, norm_wd, label_smoothing, clip_norm = 0.05, 0.9, 1e-3, 0.0, 0.1, 5.0


def images() -> TensorDataset:
    """Return 40 noisy images, brighter in the quarter of their class."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(40) % classes
    x = 0.3 * torch.randn(40, 3, 8, 8, generator=generator)
    for i, target in enumerate(targets.tolist()):
        row, column = divmod(target, 2)
        x[i, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return TensorDataset(x, targets)


def get_model() -> nn.Module:
    """Return a small convolutional net with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def get_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, with another weight decay for norms (the reference's set_weight_decay)."""
    norms = [
        p
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
        for p in module.parameters()
    ]
    others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
    groups = [{"params": others, "weight_decay": wd}, {"params": norms, "weight_decay": norm_wd}]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, weight_decay=wd, nesterov=True)


def get_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """A linear warm-up of one epoch, then a cosine; stepped after each epoch."""
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - 1)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[1])


def get_collate_fn() -> Any:
    """One of mixup and cutmix for each batch;
    here with random numbers of the batch, so that two trainings draw alike.
    """
    mix = v2.RandomChoice(
        [v2.MixUp(alpha=0.2, num_classes=classes), v2.CutMix(alpha=1.0, num_classes=classes)]
    )

    def collate(samples: Any) -> Any:
        x, y = default_collate(samples)
        with torch.random.fork_rng():
            torch.manual_seed(int(x.abs().sum() * 1000))
            return mix(x, y)

    return collate


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return those of training and of validation;
    unshuffled, so that both trainings have one order.
    """
    data = images()
    return DataLoader(data, batch_size, collate_fn=get_collate_fn()), DataLoader(data, batch_size)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of right answers."""
    return (output.argmax(1) == target).float().mean()


def as_the_reference_writes_it() -> tuple[nn.Module, float]:
    """Return the average of the weights, and its accuracy."""
    model = get_model()
    train, val = loaders()
    criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    optimizer = get_optimizer(model)
    scheduler = get_scheduler(optimizer)
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    model_ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging, use_buffers=True)
    for _ in range(epochs):
        model.train()
        for image, target in train:
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            model_ema.update_parameters(model)
        scheduler.step()
    model_ema.eval()
    with torch.inference_mode():
        right = sum(float(accuracy(model_ema(image), target)) * len(image) for image, target in val)
    return model_ema.module, right / 40


class Classification(trainkit.Task):
    """The same as a Task."""

    def __init__(self) -> None:
        super().__init__()
        self.model = get_model()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        return self.model(image)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        image, target = batch
        return self.criterion(self(image), target)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        image, target = batch
        self.log("val/acc", accuracy(self(image), target))

    def configure_optimizers(self) -> Any:
        """Return the reference's optimizer and schedule."""
        optimizer = get_optimizer(self.model)
        return [optimizer], [get_scheduler(optimizer)]


def weights(model: nn.Module) -> Tensor:
    """Return weights and statistics as a vector."""
    return torch.cat(
        [
            value.double().flatten()
            for name, value in model.state_dict().items()
            if "num_batches" not in name
        ]
    )


def test_the_reference_training_of_torchvision(tmp_path: Path) -> None:
    """The average of the weights, with batch norm's statistics, and its accuracy."""
    average, right = as_the_reference_writes_it()
    task = Classification()
    train, val = loaders()
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "run_dir": str(tmp_path),
    }
    ema = trainkit.EMA(decay=0.9, warmup=False)
    trainkit.Trainer(max_epochs=epochs, gradient_clip_val=clip_norm, callbacks=[ema], **quiet).fit(
        task, train, val
    )
    assert torch.allclose(weights(task.model), weights(average), atol=1e-5)
    assert trainkit.Trainer(**quiet).validate(task, val, ckpt_path="best")[
        "val/acc"
    ] == pytest.approx(right, abs=1e-6)
    assert right > 0.9
