"""The latest values, as trainer.callback_metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import EarlyStopping
from trainkit.metrics.latest import EvaluationValues, LatestMetrics


def test_a_name_that_was_not_logged_for_an_epoch_is_explained() -> None:
    """The error says which names there are, and that a step's value is logged by on_epoch=True;
    get and `in` are a dict's.
    """
    values = LatestMetrics()
    values.put({"val_loss": 0.5}, 4)
    with pytest.raises(KeyError, match=r"no 'train_acc', .* there are val_loss.*on_epoch=True"):
        values["train_acc"]
    with pytest.raises(KeyError, match=r"there are val_loss\. Did you mean 'val_loss'\?"):
        values["val/loss"]
    assert values.get("train_acc") is None and "train_acc" not in values


def test_an_epochs_number_and_last_step_are_the_runs() -> None:
    """Though the Task logs values of these names: the history would lose epochs by them."""
    values = LatestMetrics()
    for epoch in range(3):
        values.record(epoch, 2 * epoch, {"epoch": 10.0 * epoch, "step": 7.0, "loss": 1.0})
    assert values.history == [{"epoch": n, "step": 2 * n, "loss": 1.0} for n in range(3)]


def test_a_named_loaders_value_has_its_plain_name(tmp_path: Path) -> None:
    """A value of on_step=True, on_epoch=True: a schedule and a callback may monitor either name;
    "_epoch" within another name stays there.
    """

    class Both(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "mine/far"},
            }

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("mine", 1.0 + dataloader_idx, on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log("an_epoch/time", 3.0)

    trainer = quiet(tmp_path, max_epochs=1, callbacks=[EarlyStopping("mine/far")])
    trainer.fit(Both(), loader(8), {"near": loader(4), "far": loader(4)})
    values = trainer.callback_metrics
    assert (values["mine/far"], values["mine_epoch/far"], values["mine/near"]) == (2.0, 2.0, 1.0)
    assert "an/time" not in values and values["an_epoch/time"] == 3.0


def test_the_values_of_an_evaluation_are_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """validate() and test() print them, as Lightning's do; verbose=False prints nothing."""
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Line(), loader(8), loader(4))
    capsys.readouterr()
    (value,) = trainer.validate(Line(), loader(4)).values()
    printed = capsys.readouterr().out
    assert (
        "validation, the weights of the task" in printed and f"val/loss │ {value:.6g} │" in printed
    )
    trainer.validate(Line(), loader(4), verbose=False)
    assert not capsys.readouterr().out


def test_the_path_of_a_checkpoint_is_shown_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    """It is there to be copied."""
    path = "runs/job/checkpoints/" + 9 * "epoch=3-step=158/"
    EvaluationValues({"val/acc": 0.5}).show(path)
    assert path in capsys.readouterr().out
