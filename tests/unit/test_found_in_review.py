"""Faults that a review found, each held by a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.helpers.checkpoints import snapshot
from trainkit.checkpoint.format import MANIFEST
from trainkit.checkpoint.store import LocalStore
from trainkit.errors import ConfigError, TaskError


class Small(trainkit.Task):
    """A line, with a batch norm in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(2, 1), nn.BatchNorm1d(1)
        self.norm.eval()
        self.modes: list[bool] = []
        self.extra: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.modes.append(self.norm.training)
        return self.norm(self.line(batch[0])).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", float(self.trainer.global_step % 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.line.parameters(), *self.extra], lr=0.1)


def loader() -> DataLoader[Any]:
    """Eight samples in batches of two."""
    return DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)


def quiet(folder: Path, **settings: Any) -> trainkit.Trainer:
    """A trainer that prints nothing."""
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return trainkit.Trainer(run_dir=str(folder), **silent | {"max_epochs": 2} | settings)


def test_a_part_in_eval_stays_in_eval(tmp_path: Path) -> None:
    """Validation puts every module back into the mode that the user gave it."""
    task = Small()
    quiet(tmp_path, enable_checkpointing=False).fit(task, loader(), loader())
    assert task.modes == [False] * 8
    assert task.line.training


def test_a_gradient_from_before_does_not_count(tmp_path: Path) -> None:
    """Gradients of an interrupted run are dropped when a fit starts."""
    results = []
    for left in (None, torch.full((1, 2), 1e6)):
        torch.manual_seed(0)
        task = Small()
        task.line.weight.grad = left
        quiet(tmp_path, enable_checkpointing=False, max_steps=1).fit(task, loader())
        results.append(task.line.weight.detach().clone())
    assert torch.equal(*results)


def test_gradients_of_parameters_without_optimizer_do_not_pile_up(tmp_path: Path) -> None:
    """A parameter that no optimizer updates has no gradient after a step."""
    task = Small()
    quiet(tmp_path, enable_checkpointing=False).fit(task, loader())
    assert task.norm.weight.grad is None


def test_a_parameter_outside_the_task_is_refused(tmp_path: Path) -> None:
    """An optimizer may only update the task's own parameters."""
    task = Small()
    task.extra = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(TaskError, match=r"updates 1 parameters \(one of shape \[3\]\) that are not among Small's"):
        quiet(tmp_path, enable_checkpointing=False).fit(task, loader())


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    """An optimizer that needs a closure is refused before training."""

    class Closure(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.line.parameters())

    with pytest.raises(TaskError, match="LBFGS"):
        quiet(tmp_path, enable_checkpointing=False).fit(Closure(), loader())


def test_best_is_what_was_validated(tmp_path: Path) -> None:
    """A checkpoint inside an epoch gets the score of its own weights; one that was not validated is never best."""
    keeper = trainkit.ModelCheckpoint(monitor="val/loss", save_top_k=-1, every_n_train_steps=1, filename="step={step}")
    quiet(tmp_path, callbacks=keeper, val_check_interval=2, max_epochs=1).fit(Small(), loader(), loader())
    assert keeper.best_model_score == 1.0  # step 4: 4 % 3; step 2 has 2.0, and 1 and 3 were not validated
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step=4"


def test_a_second_fit_leaves_the_first_runs_checkpoints(tmp_path: Path) -> None:
    """The same Trainer trains again: the earlier run's files move aside and none is deleted."""
    trainer = quiet(tmp_path)
    trainer.fit(Small(), loader())
    trainer.fit(Small(), loader())
    (before,) = tmp_path.glob("before-*")
    assert (before / "checkpoints" / "last" / MANIFEST).is_file()
    assert (tmp_path / "checkpoints" / "last" / MANIFEST).is_file()


def test_two_checkpoint_callbacks_in_one_folder_are_refused(tmp_path: Path) -> None:
    """They would delete each other's."""
    with pytest.raises(ConfigError, match="Two ModelCheckpoints write to"):
        quiet(tmp_path, callbacks=[trainkit.ModelCheckpoint(), trainkit.ModelCheckpoint()]).fit(Small(), loader())


@pytest.mark.parametrize("filename", ["..", ".", "last", "best", ".hidden", ""])
def test_a_checkpoints_name_cannot_lead_elsewhere(filename: str, tmp_path: Path) -> None:
    """A filename that is no folder of its own is refused, and nothing is deleted."""
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="must name a folder of its own"):
        quiet(tmp_path, callbacks=trainkit.ModelCheckpoint(filename=filename)).fit(Small(), loader())
    assert (tmp_path / "precious").is_file()


def test_a_copied_link_gives_way(tmp_path: Path) -> None:
    """If `last` became a real folder (a copy that followed links), it becomes a link again."""
    for name in ("a", "last"):
        LocalStore(tmp_path).write(name, snapshot())
    LocalStore(tmp_path).point("last", "a")
    assert (tmp_path / "last").is_symlink()


def test_plateau_waits_for_the_validations(tmp_path: Path) -> None:
    """ReduceLROnPlateau with check_val_every_n_epoch=2 moves with each validation and not between."""

    class Plateau(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.line.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "const"}}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("const", 1.0)

    trainer = quiet(tmp_path, enable_checkpointing=False, max_epochs=6, check_val_every_n_epoch=2)
    trainer.fit(Plateau(), loader(), loader())
    assert trainer.run.rates.current() == [0.25]  # three validations: the first sets the mark, two do not improve


def test_fp16_with_an_optimizer_that_has_no_gradients(tmp_path: Path) -> None:
    """Loss scaling skips an optimizer without gradients in a step."""

    class Two(Small):
        def configure_optimizers(self) -> Any:
            self.idle = nn.Linear(1, 1)
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.line, self.idle)]

    task = Two()
    quiet(tmp_path, enable_checkpointing=False, precision="16-mixed").fit(task, loader())
    assert task.idle.weight.grad is None


def test_a_step_that_asks_for_the_loader_raises(tmp_path: Path) -> None:
    """validation_step with dataloader_idx gets the number of the loader."""

    class Several(Small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("which", float(dataloader_idx))

    values = quiet(tmp_path).validate(Several(), [loader(), loader()])
    assert values == {"which/dataloader_idx_0": 0.0, "which/dataloader_idx_1": 1.0}
