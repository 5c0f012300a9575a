"""Behaviours of batches, seeds and schedulers by hand."""

from __future__ import annotations

from typing import Any

import torch

from tests.same_names.kit import Framework, data, weights
from tests.same_names.table import differs, equal


@equal
def hooks_of_a_datamodule_and_a_module(kit: Framework) -> Any:
    """A DataModule's on_before_batch_transfer beside a module's other transfer hooks."""
    seen: list[str] = []

    class Data(kit.DataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            return data(8)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append("before, of the DataModule")
            return batch

    def transfer_batch_to_device(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
        seen.append("transfer")
        return [part.to(device) for part in batch]

    def on_after_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        seen.append("after")
        return batch

    members: dict[str, Any] = {"on_after_batch_transfer": on_after_batch_transfer}
    members |= {"transfer_batch_to_device": transfer_batch_to_device}
    members |= {"on_before_batch_transfer": lambda self, batch, index: seen.append("wrong")}
    kit.trainer(max_epochs=1).fit(kit.line(**members), datamodule=Data())
    return seen


def by_seed(kit: Framework, seed: int) -> list[float]:
    """Return the weights after a fit with dropout and shuffled data, seeded by the user."""
    task = kit.line()
    task.drop = torch.nn.Dropout(0.5)
    task.forward = lambda x: task.layer(task.drop(x))
    kit.root.seed_everything(seed)
    kit.trainer(max_epochs=1).fit(task, data(shuffle=True))
    return weights(task)


@equal
def seeds_of_the_user(kit: Framework) -> Any:
    """seed_everything(n) decides the order of samples and dropout: twice 1, and 2."""
    first, again, other = (by_seed(kit, seed) for seed in (1, 1, 2))
    return first == again, first == other


@equal
def classes_by_hand(kit: Framework) -> Any:
    """isinstance of self.optimizers() and self.lr_schedulers() in manual optimization."""
    seen: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        seen.append((isinstance(optimizer, torch.optim.SGD), isinstance(scheduler, plateau)))
        if isinstance(scheduler, plateau):
            scheduler.step(1.0)
        seen.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.04)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

    members: dict[str, Any] = {"automatic_optimization": False, "training_step": training_step}
    members["configure_optimizers"] = configure_optimizers
    kit.trainer(max_epochs=1).fit(kit.line(**members), data())
    return seen


@differs("There forward gets the whole batch; here the first part of a tuple or list, the inputs.")
def predictions_by_default(kit: Framework) -> Any:
    """predict without a predict_step, where a batch has inputs and targets."""

    def forward(self: Any, batch: Any) -> Any:
        return self.layer(batch[0])

    predictions = kit.trainer().predict(kit.line(forward=forward), data(8))
    return [list(part.shape) for part in predictions]


@equal
def data_are_prepared(kit: Framework) -> Any:
    """prepare_data with prepare_data_per_node = False, on one process."""
    calls: list[str] = []

    class Data(kit.DataModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.prepare_data_per_node = False

        def prepare_data(self) -> None:
            calls.append("prepare")

        def train_dataloader(self) -> Any:
            return data(8)

    kit.trainer(max_epochs=1).fit(kit.line(), datamodule=Data())
    return calls
