"""EMA: when the weights are averaged, which weights are validated and saved, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.extensions.swa.falling import Falling
from tests.helpers.by_hand import Pair
from tests.helpers.threads import World
from tests.helpers.toy import Line, Net, fill, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA, ModelCheckpoint, StochasticWeightAveraging
from trainkit.engine.sending import with_averages
from trainkit.errors import ConfigError


class Watch(Callback):
    """Records the weights after each step, and those seen by each validation."""

    def __init__(self) -> None:
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_after_optimizer_step(self, trainer: Any, task: Any) -> None:
        """The update was made."""
        self.trained.append(weights(task))

    def on_validation_batch_start(
        self, trainer: Any, task: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """A validation runs."""
        self.validated.append(weights(task))


def averages(trained: list[Tensor], decay: float, warmup: bool) -> list[Tensor]:
    """Return the average after each update, computed by a plain loop."""
    found = [trained[0].clone()]
    for n, value in enumerate(trained[1:], 1):
        kept = min(decay, (1 + n) / (10 + n)) if warmup else decay
        found.append(kept * found[-1] + (1 - kept) * value)
    return found


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two float64 vectors agree to rounding."""
    return torch.allclose(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_is_validated_saved_and_left(tmp_path: Path, warmup: bool) -> None:
    """Validation, weights.safetensors and the task at the end use the plain loop's average;
    training itself is unchanged.
    """
    plain, watch_plain = Line(), Watch()
    quiet(tmp_path / "plain", max_epochs=3, precision="64-true", callbacks=watch_plain).fit(
        plain, loader(23), loader(4)
    )
    task, watch = Line(), Watch()
    settings: dict[str, Any] = {"max_epochs": 3, "precision": "64-true", "num_sanity_val_steps": 0}
    trainer = quiet(
        tmp_path / "ema",
        callbacks=[EMA(0.9, warmup), watch, ModelCheckpoint(save_top_k=-1)],
        **settings,
    )
    trainer.fit(task, loader(23), loader(4))
    assert all(torch.equal(a, b) for a, b in zip(watch.trained, watch_plain.trained, strict=True))
    by_hand = averages(watch.trained, 0.9, warmup)
    assert len(watch.validated) == 3
    for i, step in enumerate((6, 12, 18)):
        assert close(watch.validated[i], by_hand[step - 1])
        file = load_file(
            tmp_path / "ema" / "checkpoints" / f"epoch={i}-step={step}" / "weights.safetensors"
        )
        assert close(
            torch.cat([file[n].reshape(-1) for n, _ in task.named_parameters()]), by_hand[step - 1]
        )
    assert close(weights(task), by_hand[-1])
    assert not close(weights(task), watch.trained[-1])


@pytest.mark.parametrize(("every", "start"), [(2, 0), (2, 1), (3, 0)])
def test_updates_by_hand_are_averaged_too(tmp_path: Path, every: int, start: int) -> None:
    """A batch of two optimizers makes two updates, so that some counts are never seen."""
    ema = EMA(0.5, update_every_n_steps=every, update_starting_at_step=start)
    quiet(tmp_path, callbacks=ema).fit(Pair(), loader(24))
    assert ema._average is not None
    assert ema._average.num_updates == (6 if every == 2 else 4)


@pytest.mark.parametrize("callbacks", [[], [EMA(0.5)]], ids=["without", "with"])
def test_a_checkpoint_validates_as_it_was_monitored(tmp_path: Path, callbacks: Any) -> None:
    """validate with ckpt_path=best gives the value that made it the best,
    with the callback and without.
    """
    keeper = ModelCheckpoint(monitor="val/loss")
    settings: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 2}
    quiet(tmp_path, callbacks=[EMA(0.5), keeper], **settings).fit(Net(), loader(23), loader(8))
    values = quiet(tmp_path, callbacks=callbacks).validate(Net(), loader(8), ckpt_path="best")
    assert values["val/loss"] == pytest.approx(keeper.best_model_score, rel=1e-6)


def test_a_validation_inside_an_epoch_knows_the_last_update(tmp_path: Path) -> None:
    """With val_check_interval the step's own update is in the average that is validated."""
    watch = Watch()
    settings: dict[str, Any] = {
        "max_steps": 6,
        "precision": "64-true",
        "val_check_interval": 2,
        "num_sanity_val_steps": 0,
    }
    quiet(tmp_path, callbacks=[EMA(0.5, warmup=False), watch], **settings).fit(
        Line(), loader(24), loader(4)
    )
    by_hand = averages(watch.trained, 0.5, False)
    assert [
        close(value, by_hand[step]) for value, step in zip(watch.validated, (1, 3, 5), strict=True)
    ] == [True] * 3


def test_updates_can_be_rare_and_late(tmp_path: Path) -> None:
    """Of steps 1, 4, 7, ..., as in Lightning, those after the start count; before the first of them
    the weights themselves are validated and saved.
    """
    watch, task = Watch(), Line()
    callback = EMA(0.5, warmup=False, update_every_n_steps=3, update_starting_at_step=2)
    settings: dict[str, Any] = {
        "max_steps": 9,
        "precision": "64-true",
        "val_check_interval": 3,
        "num_sanity_val_steps": 0,
    }
    quiet(tmp_path, callbacks=[callback, watch], **settings).fit(task, loader(36), loader(4))
    assert torch.equal(watch.validated[0], watch.trained[2])
    assert close(watch.validated[1], watch.trained[3])
    by_hand = averages([watch.trained[3], watch.trained[6]], 0.5, False)
    assert close(watch.validated[2], by_hand[-1])
    assert close(weights(task), by_hand[-1])


def test_an_update_that_was_held_back_does_not_count(tmp_path: Path) -> None:
    """A step that fp16 skipped leaves the average alone."""

    class Overflow(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if self.global_step in (1, 3) else loss

    watch, callback = Watch(), EMA(0.5, warmup=False)
    trainer = quiet(tmp_path, max_steps=6, precision="16-mixed", callbacks=[callback, watch])
    trainer.fit(Overflow(), loader(24))
    assert trainer.state.skipped_steps >= 2
    assert callback._average is not None
    assert callback._average.num_updates == 6 - trainer.state.skipped_steps


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stop_at", [1, 4, 6, 9])
def test_going_on_changes_no_bit(
    tmp_path: Path, stop_at: int, precision: Any, use_buffers: bool
) -> None:
    """Stopped at any step and resumed, trained weights,
    average and values equal those of an uninterrupted run.
    """
    ends = []
    for name, steps in (("whole", [14]), ("parts", [stop_at, 14])):
        for steps_now in steps:
            task, watch = Falling(), Watch()
            callbacks = [
                EMA(0.9, use_buffers=use_buffers),
                watch,
                ModelCheckpoint(every_n_train_steps=5, every_n_epochs=1),
            ]
            trainer = quiet(
                tmp_path / name, max_steps=steps_now, precision=precision, callbacks=callbacks
            )
            ckpt_path = "last" if len(steps) > 1 and steps_now == 14 else None
            trainer.fit(task, loader(23, shuffle=True), loader(5), ckpt_path=ckpt_path)
        ends.append((task.state_dict(), watch.trained[-1], trainer.callback_metrics))
    (whole, trained, values), (parts, trained_parts, values_parts) = ends
    assert torch.equal(trained, trained_parts)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert values == values_parts


def test_a_checkpoint_of_any_time_changes_no_bit(tmp_path: Path) -> None:
    """Saving inside a step, in hooks and twice a step is seen nowhere in the training."""

    class Saves(Callback):
        def on_train_batch_end(
            self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            trainer.save_checkpoint(tmp_path / "batch")

        def on_train_step_start(self, trainer: Any, task: Any) -> None:
            trainer.save_checkpoint(tmp_path / "step")

        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            trainer.save_checkpoint(tmp_path / "epoch", weights_only=True)

    ends = []
    for name, callbacks in (("plain", [EMA(0.8)]), ("saves", [Saves(), EMA(0.8)])):
        task, watch = Falling(), Watch()
        settings: dict[str, Any] = {
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "callbacks": [*callbacks, watch],
        }
        quiet(tmp_path / name, **settings).fit(task, loader(23), loader(5))
        ends.append((watch.trained, weights(task)))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("where", ["validation_step", "training_step"])
def test_an_error_leaves_the_weights_that_were_trained(tmp_path: Path, where: str) -> None:
    """After an error in validation, or in training after a checkpoint,
    the task holds the trained weights.
    """

    class Fails(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if where == "validation_step":
                raise RuntimeError("here")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 6 and where == "training_step":
                raise RuntimeError("here")
            return super().training_step(batch, batch_idx)

    watch, task = Watch(), Fails()
    callbacks = [watch, EMA(0.5), ModelCheckpoint()]
    with pytest.raises(RuntimeError, match="here"):
        quiet(tmp_path, max_epochs=2, callbacks=callbacks, num_sanity_val_steps=0).fit(
            task, loader(23), loader(4)
        )
    assert torch.equal(weights(task), watch.trained[-1])


def test_an_update_is_counted_once_over_a_restart(tmp_path: Path) -> None:
    """A checkpoint before the first step of a resumed run does not update the average."""

    class Saves(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            trainer.save_checkpoint(tmp_path / "start")

    for steps, ckpt_path in ((4, None), (5, "last")):
        callback = EMA(0.5)
        callbacks = [callback, Saves(), ModelCheckpoint()]
        quiet(tmp_path, max_steps=steps, callbacks=callbacks).fit(
            Line(), loader(23), ckpt_path=ckpt_path
        )
    assert callback._average is not None
    assert callback._average.num_updates == 5


def test_without_checkpoints_the_average_is_left_too(tmp_path: Path) -> None:
    """The task ends with the average even if nothing is saved."""
    task, watch = Line(), Watch()
    settings: dict[str, Any] = {
        "max_steps": 5,
        "precision": "64-true",
        "callbacks": [EMA(0.5), watch],
    }
    quiet(tmp_path, **settings).fit(task, loader(23))
    assert close(weights(task), averages(watch.trained, 0.5, True)[-1])


def test_statistics_are_sent_as_the_engine_sends_buffers(tmp_path: Path) -> None:
    """Averages and trained ones: those of a pipeline's stage are not rank 0's."""

    class Normed(Line):
        def make_model(self) -> nn.Module:
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            fill(model)
            return model

    class Own(Callback):
        def on_train_end(self, trainer: Any, task: Any) -> None:
            self.trained = task.model[1].running_mean.clone()
            self.average = ema_of(trainer).buffers()[task.model[1].running_mean].clone()

    def ema_of(trainer: Any) -> Any:
        return next(c for c in trainer.callbacks if isinstance(c, EMA))._average

    def work(engine: Any) -> Any:
        def send(task: Any, averages: Any = None) -> None:
            for tensor in with_averages(task.buffers(), averages):
                tensor.copy_(engine.comm.exchange(tensor.clone())[1])

        engine.send_buffers = send
        task, own = Normed(), Own()
        trainer = quiet(tmp_path, engine=engine, callbacks=[own, EMA(0.5)])
        trainer.fit(task, loader(16))
        aside = ema_of(trainer).state_dict()["aside"]
        return own, task.model[1].running_mean.clone(), aside["model.1.running_mean"]

    (first, *of_first), (last, *of_last) = World(2).run(work)
    assert not torch.equal(first.average, last.average)
    for shown, trained in (of_first, of_last):
        assert torch.equal(shown, last.average) and torch.equal(trained, last.trained)


def test_a_second_fit_begins_again(tmp_path: Path) -> None:
    """A fit does not inherit the average of the previous fit."""
    trainer = quiet(tmp_path, max_epochs=1, callbacks=EMA(0.5))
    trainer.fit(Line(), loader(23))
    second = Line()
    trainer.fit(second, loader(23))
    third = Line()
    quiet(tmp_path, max_epochs=1, callbacks=EMA(0.5)).fit(third, loader(23))
    assert torch.equal(weights(second), weights(third))


def test_the_task_is_not_copied(tmp_path: Path) -> None:
    """A task that cannot be copied is averaged all the same."""

    class Once(Line):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            raise AssertionError("copied")

    quiet(tmp_path, callbacks=EMA()).fit(Once(), loader(8), loader(4))


def test_it_says_once_what_the_values_are_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says that values and checkpoints belong to the average, and that its decay begins
    smaller, if it does.
    """
    line = "EMA: validation, checkpoints and the end of the run use averaged weights (decay 0.99{})"
    for warmup, more in ((True, ", beginning smaller: warmup=True"), (False, "")):
        quiet(tmp_path, max_epochs=2, callbacks=EMA(0.99, warmup)).fit(Line(), loader(8), loader(4))
        said = " ".join(capsys.readouterr().out.split())
        assert said.count(line.format(more)) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 1.5}, r"EMA\.decay is 1\.5; it must be a number from 0 to 1"),
        ({"decay": -0.1}, r"EMA\.decay is -0\.1"),
        ({"decay": 1.0}, r"EMA\.decay is 1, which would keep the first weights"),
        (
            {"update_every_n_steps": 0},
            r"EMA\.update_every_n_steps is 0; it must be a whole number, 1 or more",
        ),
        ({"decoy": 0.9}, r"EMA\.decoy is not a setting\. Did you mean 'decay'"),
    ],
)
def test_bad_settings_are_refused(settings: Any, words: str) -> None:
    """An illegal setting is refused with the legal range."""
    with pytest.raises(ConfigError, match=words):
        EMA(**settings)


def test_two_averages_are_refused(tmp_path: Path) -> None:
    """Two callbacks that average would each put their own into the model."""
    callbacks = [EMA(), StochasticWeightAveraging(0.1)]
    with pytest.raises(
        ConfigError, match="EMA and StochasticWeightAveraging would each put their own average"
    ):
        quiet(tmp_path, callbacks=callbacks).fit(Line(), loader(8))


def test_a_checkpoint_leaves_the_trained_weights(tmp_path: Path) -> None:
    """The average is in the model only while it is written;
    resuming without EMA reports the missing callback.
    """
    same: list[bool] = []

    class Save(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            before = weights(task)
            trainer.save_checkpoint(tmp_path / "mine")
            same.append(torch.equal(weights(task), before))

    quiet(tmp_path, callbacks=[EMA(), Save()]).fit(Line(), loader(16))
    assert same == [True] * 4


def test_going_on_without_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint with an average, resumed without EMA,
    resumes from the average and reports it.
    """
    quiet(tmp_path, callbacks=[EMA(), ModelCheckpoint()]).fit(Line(), loader(16))
    quiet(tmp_path, max_epochs=2).fit(Line(), loader(16), ckpt_path="last")
    assert "the state of EMA (the saved weights are its averages: add it" in capsys.readouterr().out
