"""Optimizers with train() and eval(): which weights are trained, validated and saved, and
resuming.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA, BackboneFinetuning, ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.extensions.check_resume.compare import differences
from trainkit.optim import constant, decay_groups, schedule_free

schedulefree = pytest.importorskip("schedulefree")


class Free(Net):
    """Dropout and batch norm under AdamW without a schedule."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return schedule_free(decay_groups(self), 0.02)


class FreeLine(Line):
    """The same without dropout and batch norm, in the user's own way."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.1)


class Watch(Callback):
    """Records the weights before and after each step, and those that each validation sees."""

    def __init__(self) -> None:
        self.trained: list[Tensor] = []
        self.updated: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """A step begins."""
        self.trained.append(weights(task))

    def on_after_optimizer_step(self, trainer: Any, task: Any) -> None:
        """An update was made."""
        self.updated.append(weights(task))

    def on_validation_batch_start(
        self, trainer: Any, task: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """A validation runs."""
        self.validated.append(weights(task))


def by_hand(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Train FreeLine as the package's README does; return the weights before each step, and those
    to evaluate after it.
    """
    task = FreeLine().double()
    optimizer = task.configure_optimizers()
    trained: list[Tensor] = []
    averages: list[Tensor] = []
    for batch in [[x.double() for x in batch] for batch in loader(8)] * steps:
        optimizer.train()
        trained.append(weights(task))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(task(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.eval()
        averages.append(weights(task))
    return trained, averages


def test_averages_are_validated_saved_and_left(tmp_path: Path) -> None:
    """Validation, weights.safetensors and the task at the end have the weights of eval(), as in a
    loop by hand; steps have those of train().
    """
    task, watch = FreeLine(), Watch()
    settings: dict[str, Any] = {"precision": "64-true", "num_sanity_val_steps": 0}
    trainer = quiet(
        tmp_path,
        max_epochs=2,
        seed=0,
        val_check_interval=1,
        callbacks=[watch, ModelCheckpoint(save_top_k=-1)],
        **settings,
    )
    trainer.fit(task, loader(8), loader(4))
    trained, averages = by_hand(2)
    for own, expected in zip(watch.trained, trained, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-14)
    for own, expected in zip(watch.validated, averages, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-14)
    file = load_file(tmp_path / "checkpoints" / "last" / "weights.safetensors")
    saved = torch.cat([file[n].reshape(-1) for n, _ in task.named_parameters()])
    assert torch.equal(saved, watch.validated[-1])
    assert torch.equal(weights(task), watch.validated[-1])
    assert not torch.allclose(averages[-1], trained[-1])


def test_switching_costs_training_no_bit(tmp_path: Path) -> None:
    """A run with validations and checkpoints between its steps trains as one without."""
    tasks = [Free() for _ in range(2)]
    quiet(tmp_path / "plain", max_steps=9).fit(tasks[0], loader(23))
    often = ModelCheckpoint(every_n_train_steps=2)
    settings = {"max_steps": 9, "val_check_interval": 2, "callbacks": often}
    quiet(tmp_path / "often", **settings).fit(tasks[1], loader(23), loader(7))
    assert torch.equal(weights(tasks[0]), weights(tasks[1]))


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Stopped inside an epoch and resumed, trained weights and averages are those of the run that
    never stopped.
    """
    tasks = [Free() for _ in range(3)]
    settings = {"enable_checkpointing": True}
    quiet(tmp_path / "whole", max_steps=9, **settings).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=4, **settings).fit(tasks[1], loader(23))
    quiet(tmp_path / "parts", max_steps=9, **settings).fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))
    ends = [tmp_path / name / "checkpoints" / "last" for name in ("whole", "parts")]
    assert differences(*ends) == []
    assert not torch.equal(weights(tasks[1]), weights(tasks[0]))


def test_checkpoints_are_compared_by_their_trained_weights_too(tmp_path: Path) -> None:
    """One that differs in these alone is named."""
    quiet(tmp_path, max_steps=2, enable_checkpointing=True).fit(Free(), loader(8))
    one, other = tmp_path / "checkpoints" / "last", tmp_path / "other"
    shutil.copytree(one, other)
    saved = torch.load(other / "training.pt", weights_only=True)
    saved["trained_weights"]["model.0.weight"][0, 0] += 1
    torch.save(saved, other / "training.pt")
    (part,) = differences(one, other)
    assert part.first is not None and part.first.startswith("trained weight model.0.weight: 1 of")


class Thirds(torch.optim.SGD):
    """An optimizer of a user, evaluated at a third of its weights; to and fro loses digits."""

    def eval(self) -> None:
        """Divide them."""
        self._multiply("eval", 1 / 3)

    def train(self) -> None:
        """Multiply them, unless they are whole."""
        self._multiply("train", 3.0)

    @torch.no_grad()
    def _multiply(self, mode: str, factor: float) -> None:
        for group in self.param_groups:
            if group.setdefault("mode", "train") != mode:
                group["mode"] = mode
                for parameter in group["params"]:
                    parameter.mul_(factor)


class Own(Line):
    """A task under it."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return Thirds(self.parameters(), lr=0.1)


def test_any_optimizer_with_both_methods_is_switched(tmp_path: Path) -> None:
    """An optimizer of one's own needs no more than train() and eval()."""
    task, plain, watch = Own(), Line(), Watch()
    quiet(tmp_path, callbacks=watch, num_sanity_val_steps=0).fit(task, loader(23), loader(4))
    quiet(tmp_path / "plain").fit(plain, loader(23))
    assert torch.equal(watch.updated[-1], weights(plain))
    torch.testing.assert_close(watch.validated[0], weights(plain) / 3)
    assert torch.equal(weights(task), watch.validated[0])


def test_a_resumed_run_trains_the_weights_that_were_set_aside(tmp_path: Path) -> None:
    """Not those that train() makes of the saved ones, which lack digits."""
    tasks = [Own() for _ in range(3)]
    settings = {"enable_checkpointing": True}
    quiet(tmp_path / "whole", max_steps=5).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=4, **settings).fit(tasks[1], loader(23))
    watch = Watch()
    resumed = quiet(tmp_path / "parts", max_steps=5, callbacks=watch)
    resumed.fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))
    assert not torch.equal(watch.trained[0].float() / 3 * 3, watch.trained[0].float())


def test_an_error_in_a_validation_leaves_the_trained_weights(tmp_path: Path) -> None:
    """What is saved after it resumes from these."""

    class Fails(FreeLine):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("an error of the user's")

    task, watch = Fails(), Watch()
    trainer = quiet(tmp_path, callbacks=watch, num_sanity_val_steps=0, max_steps=3)
    with pytest.raises(RuntimeError, match="an error of the user's"):
        trainer.fit(task, loader(12), loader(4))
    assert torch.equal(weights(task), watch.updated[-1])


class Scheduled(FreeLine):
    """With a schedule that its averages replace."""

    def configure_optimizers(self) -> Any:
        """Return both."""
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Constant(FreeLine):
    """With the schedule that is none."""

    def configure_optimizers(self) -> Any:
        """Return both."""
        optimizer = super().configure_optimizers()
        return [optimizer], [constant(optimizer, 1)]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (FreeLine, {"Batch norm": False, "changes the rate too": False}),
        (Free, {"Batch norm's statistics are of the former": True}),
        (Constant, {"changes the rate too": False}),
        (Scheduled, {"and ExponentialLR changes the rate too: leave it out (lr=constant)": True}),
    ],
)
def test_one_line_says_which_weights_are_which(
    task: Any, expected: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what its averages do not go well with."""
    quiet(tmp_path, max_steps=1).fit(task(), loader(8))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("AdamWScheduleFree: steps train the weights of its train()") == 1
    assert {words: words in out for words in expected} == expected


class Warm(FreeLine):
    """With a warm-up of its own."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.1, warmup_steps=7)


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (FreeLine, {"callbacks": EMA()}, "puts its own averages .* so would EMA"),
        (
            FreeLine,
            {"callbacks": BackboneFinetuning(1, ["model"])},
            "BackboneFinetuning adds weights .*optimizer=adamw",
        ),
        (Warm, {"lr_warmup_steps": 3}, r"warmup_steps=7, .*\(3 steps\): .* Leave out"),
    ],
)
def test_what_does_not_go_with_a_switch_is_refused(
    task: Any, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Each with what to leave out."""
    with pytest.raises(ConfigError, match=words):
        quiet(tmp_path, **settings).fit(task(), loader(8))


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit\[schedulefree\]'"):
        schedule_free(Line().parameters())
