"""Tiny real tasks and data for all tests, and trainers that print and write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks import ModelCheckpoint
from trainkit.trainer import Trainer

if TYPE_CHECKING:
    import pytest


def rows(num_samples: int = 23) -> TensorDataset:
    """Return samples (x of shape [3], y of shape [1]), always the same."""
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(num_samples, 3, generator=generator)
    noise_NO = 0.1 * torch.randn(num_samples, 1, generator=generator)
    return TensorDataset(x_NI, x_NI.sum(1, keepdim=True) + noise_NO)


def loader(data: int | Dataset[Any] = 23, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader over a data set, or over a number of rows."""
    return DataLoader(
        rows(data) if isinstance(data, int) else data, batch_size=batch_size, **options
    )


def fill(model: nn.Module) -> None:
    """Set the weights to fixed values, all different, independent of the random state."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            values = torch.linspace(-0.6, 0.5, parameter.numel(), dtype=parameter.dtype) * (
                1 + 0.1 * i
            )
            parameter.copy_(values.reshape(parameter.shape))


class Line(Task):
    """A linear layer under the mean squared error; keyword arguments go to SGD."""

    def __init__(self, lr: float = 0.1, **sgd: Any) -> None:
        super().__init__()
        self.sgd = {"lr": lr} | sgd
        self.model = self.make_model()
        fill(self.model)

    def make_model(self) -> nn.Module:
        """Return the model: 3 numbers in, 1 out."""
        return nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's answer."""
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log and return the loss."""
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        x, y = batch
        self.log("val/loss", functional.mse_loss(self(x), y))

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), **self.sgd)


class Net(Line):
    """Two layers with dropout and batch norm:
    a model with random numbers and buffers of its own.
    """

    def make_model(self) -> nn.Module:
        """Return the model: 3 numbers in, 1 out."""
        return nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
        )


class Recorder(Callback):
    """Keeps the learning rate of each step, and the gradients' norm before it is clipped,
    and as it was used.
    """

    def __init__(self) -> None:
        self.lrs: list[float] = []
        self.norms: list[float] = []
        self.used: list[float] = []

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Record the rate and the gradients' norm before the optimizer's step."""
        self.lrs.append(optimizer.param_groups[0]["lr"])
        self.norms.append(_norm(task))

    def on_after_optimizer_step(self, trainer: RunView, task: Task) -> None:
        """Record the norm with which the optimizer has updated."""
        self.used.append(_norm(task))


def _norm(task: Task) -> float:
    return float(
        torch.cat([p.grad.reshape(-1) for p in task.parameters() if p.grad is not None]).norm()
    )


def quiet(run_dir: Path | str, **settings: Any) -> Trainer:
    """Return a Trainer that shows nothing and writes nothing, unless `settings` change that."""
    callbacks = settings.get("callbacks") or []
    own = callbacks if isinstance(callbacks, list) else [callbacks]
    silent = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in own),
        "enable_model_summary": False,
    }
    if not any(name in settings for name in ("max_epochs", "max_steps", "fast_dev_run")):
        settings["max_epochs"] = 1
    return Trainer(run_dir=str(run_dir), **silent | settings)


def weights(model: nn.Module) -> Tensor:
    """Return all weights as one vector of float64."""
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


class Numbered(Dataset[Any]):
    """Rows with their number: (x, y, number)."""

    def __init__(self, num_samples: int) -> None:
        self.rows = rows(num_samples)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x, y = self.rows[index]
        return x, y, index


class Numbers(Line):
    """A Line on numbered rows, with momentum;
    its epoch value shows whether each sample was counted once.
    """

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train."""
        self.log("train/x", batch[0].double().mean(), on_step=False, on_epoch=True)
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        super().validation_step(batch[:2], batch_idx)


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let torch.compile take a backend that is fast, or that counts."""
    real = torch.compile

    def with_backend(call: Any, mode: Any = None, **more: Any) -> Any:
        return real(call, backend=backend, **more)

    monkeypatch.setattr(torch, "compile", with_backend)
