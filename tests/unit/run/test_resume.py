"""A run that is stopped and resumed ends bit for bit like the run that never stopped."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, WeightedRandomSampler

from tests.helpers.threads import World
from tests.helpers.toy import Line, Net, Recorder, loader, quiet, rows, weights
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.errors import CheckpointError


class Scheduled(Net):
    """Momentum, decay, dropout, batch norm and a schedule: everything that a restart could lose."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9, weight_decay=1e-3)

    def configure_optimizers(self) -> Any:
        """Return SGD under one cycle of the rate."""
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=18)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Noisy(Dataset[Any]):
    """Rows under random augmentation."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        x_I, y_O = rows(23)[index]
        return x_I + 0.1 * torch.randn(3) + float(np.random.rand()), y_O


def train(
    folder: Path, steps: int, ckpt_path: str | None = None, data: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Train up to a step, with a validation after each epoch; return task and trainer."""
    task = Scheduled()
    recorder = Recorder()
    known: dict[str, Any] = {
        "lr_warmup_steps": 8,
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": 2,
    }
    trainer = quiet(
        folder, max_steps=steps, enable_checkpointing=True, callbacks=recorder, **(known | settings)
    )
    data = loader(Noisy(), 3, shuffle=True) if data is None else data
    trainer.fit(task, data, loader(5), ckpt_path=ckpt_path)
    return task, recorder


@pytest.mark.parametrize("stop_at", [1, 4, 6, 7, 12, 15])
def test_stop_and_resume_change_no_bit(tmp_path: Path, stop_at: int) -> None:
    """Stopped at any step, inside or at the end of an epoch, and resumed in new objects,
    the run ends the same.
    """
    whole, all_steps = train(tmp_path / "whole", 16)
    _, first = train(tmp_path / "parts", stop_at)
    torch.rand(9)  # whatever happened in between
    task, second = train(tmp_path / "parts", 16, ckpt_path="last")
    assert first.lrs + second.lrs == all_steps.lrs
    for name, value in task.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_a_clock_that_is_behind_repeats_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is queued again on another host resumes from its own newest checkpoint from then
    on, though one of the host before has a later time of writing.
    """

    def to_step(step: int) -> int:
        recorder = Recorder()
        keep_all = ModelCheckpoint(save_top_k=-1)
        trainer = quiet(tmp_path, max_steps=step, callbacks=[recorder, keep_all])
        trainer.fit(Scheduled(), loader(Noisy(), 3), loader(5), ckpt_path="auto")
        return len(recorder.lrs)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:
            return super().now(tz) + timedelta(hours=1)

    with monkeypatch.context() as clock:
        module = SimpleNamespace(datetime=Ahead, timezone=timezone)
        clock.setattr("trainkit.checkpoint.format.datetime", module)
        assert to_step(2) == 2
    assert to_step(4) == 2
    assert to_step(5) == 1


class Sampling(Scheduled):
    """Draws in validation too, as a diffusion model does."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Draw."""
        torch.rand(3), np.random.rand()
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("stop_at", [1, 4, 6, 12])
@pytest.mark.parametrize("every", [1, 2])
def test_a_validation_that_the_longer_run_has_not_moves_no_random_number(
    tmp_path: Path, stop_at: int, every: int
) -> None:
    """A run that a limit stops ends with a validation: what it draws is not drawn by the run that
    is not stopped there.
    """

    def end(folder: Path, steps: int, **more: Any) -> Any:
        task = Sampling()
        saving = ModelCheckpoint(monitor="val/loss", save_last=True)
        quiet(folder, max_steps=steps, callbacks=saving, check_val_every_n_epoch=every).fit(
            task, loader(Noisy(), 4), loader(5), **more
        )
        return weights(task)

    whole = end(tmp_path / "whole", 16)
    end(tmp_path / "parts", stop_at)
    assert torch.equal(end(tmp_path / "parts", 16, ckpt_path="last"), whole)


def test_a_checkpoint_inside_an_epoch_is_enough(tmp_path: Path) -> None:
    """A checkpoint of every n steps, taken by a resumed run, leads to the same end."""
    keeper = ModelCheckpoint(every_n_train_steps=4, every_n_epochs=None, save_top_k=-1)
    whole = Scheduled()
    quiet(tmp_path / "whole", max_epochs=2, callbacks=keeper).fit(
        whole, loader(23, shuffle=True), loader(5)
    )
    for step in (4, 8):
        (folder,) = (tmp_path / "whole" / "checkpoints").glob(f"*step={step}")
        task = Scheduled()
        trainer = quiet(tmp_path / f"from {step}", max_epochs=2)
        trainer.fit(task, loader(23, shuffle=True), loader(5), ckpt_path=str(folder))
        assert torch.equal(weights(task), weights(whole))
        assert trainer.global_step == 12


def test_a_sampler_of_the_users_own_resumes_too(tmp_path: Path) -> None:
    """The order that a custom sampler drew is found again inside an epoch."""

    def data() -> Any:
        return loader(23, 2, sampler=WeightedRandomSampler([1.0, 2.0] * 10, num_samples=20))

    whole, _ = train(tmp_path / "whole", 9, data=data())
    train(tmp_path / "parts", 3, data=data())
    task, _ = train(tmp_path / "parts", 9, ckpt_path="last", data=data())
    assert torch.equal(weights(task), weights(whole))


def test_adam_resumes(tmp_path: Path) -> None:
    """An optimizer with moments and step counters resumes with them."""

    class Adam(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    tasks = [Adam(), Adam(), Adam()]
    quiet(tmp_path / "whole", max_steps=9).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=4, enable_checkpointing=True).fit(tasks[1], loader(23))
    quiet(tmp_path / "parts", max_steps=9).fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))


class Deep(Line):
    """Three layers, two of which are alike; the order is that of its optimizer's weights."""

    def __init__(self, order: list[int], *groups: int) -> None:
        super().__init__()
        self.order, self.groups = order, groups or (6,)

    def make_model(self) -> torch.nn.Module:
        """Return the layers."""
        return torch.nn.Sequential(*(torch.nn.Linear(3, n) for n in (3, 3, 1)))

    def configure_optimizers(self) -> Any:
        """Return AdamW with the weights in an order of the test's."""
        own = list(self.parameters())
        chosen = [own[place] for place in self.order]
        ends = np.cumsum(self.groups)
        groups = [chosen[end - n : end] for end, n in zip(ends, self.groups, strict=True)]
        return torch.optim.AdamW([{"params": group} for group in groups], lr=0.02)


@pytest.mark.parametrize("groups", [(6,), (2, 4)])
def test_moments_are_their_own_weights_in_any_order(tmp_path: Path, groups: Any) -> None:
    """The resumed optimizer has alike weights in another order, as after layers changed places in
    the code: torch would give each the moments of the weight that was there before.
    """
    order, changed = [0, 1, 2, 3, 4, 5], [2, 3, 0, 1, 4, 5]
    whole, task = Deep(order, *groups), Deep(changed, *groups)
    quiet(tmp_path / "whole", max_steps=6, enable_checkpointing=True).fit(whole, loader())
    parts = {"run_dir": tmp_path / "parts", "enable_checkpointing": True}
    quiet(**parts, max_steps=3).fit(Deep(order, *groups), loader())
    quiet(**parts, max_steps=6).fit(task, loader(), ckpt_path="last")
    assert torch.equal(weights(task), weights(whole))
    assert "param_names" not in task.trainer.optimizers[0].param_groups[0]


def test_names_of_weights_are_no_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An optimizer of named weights has them in another order: no setting has changed."""

    class Named(Line):
        def configure_optimizers(self) -> Any:
            own = list(self.model.named_parameters())
            return torch.optim.AdamW(own[:: -1 if backwards else 1], lr=0.02)

    parts: dict[str, Any] = {"run_dir": tmp_path, "enable_checkpointing": True}
    for backwards in (False, True):
        task = Named()
        quiet(**parts, max_steps=3 + 3 * backwards).fit(
            task, loader(), ckpt_path="last" if backwards else None
        )
    assert "Changed" not in capsys.readouterr().out
    assert task.trainer.optimizers[0].param_groups[0]["param_names"] == ["bias", "weight"]


@pytest.mark.parametrize("stop_at", [5, 6, 12])
def test_a_schedule_of_epochs_resumes(tmp_path: Path, stop_at: int) -> None:
    """A schedule that moves at the ends of epochs moves once an epoch,
    also if the run was stopped at one.
    """

    class Epochs(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    lrs: list[float] = []
    for steps, ckpt_path in ((stop_at, None), (18, "last")):
        recorder = Recorder()
        trainer = quiet(tmp_path, max_steps=steps, enable_checkpointing=True, callbacks=recorder)
        trainer.fit(Epochs(), loader(23), ckpt_path=ckpt_path)
        lrs += recorder.lrs
    assert lrs == pytest.approx([0.1] * 6 + [0.05] * 6 + [0.025] * 6)


def test_resuming_an_ended_run_trains_nothing(tmp_path: Path) -> None:
    """A run that had reached its limit ends at once,
    and retains its checkpoints and the best one.
    """
    monitor: dict[str, Any] = {"monitor": "val/loss", "save_top_k": 2}
    first = ModelCheckpoint(**monitor)
    quiet(tmp_path, max_epochs=3, callbacks=first).fit(Line(), loader(23), loader(5))
    best = (tmp_path / "checkpoints" / "best").resolve()
    kept = sorted(path.name for path in best.parent.iterdir())
    second = ModelCheckpoint(**monitor)
    trainer = quiet(tmp_path, max_epochs=3, callbacks=second)
    trainer.fit(Line(), loader(23), loader(5), ckpt_path="last")
    assert trainer.global_step == 18
    assert (tmp_path / "checkpoints" / "best").resolve() == best
    assert sorted(path.name for path in best.parent.iterdir()) == kept
    assert (second.best_model_path, second.best_model_score) == (
        first.best_model_path,
        first.best_model_score,
    )


def test_more_epochs_can_be_added(tmp_path: Path) -> None:
    """A finished run resumes with a higher limit, from the next epoch."""
    quiet(tmp_path, max_epochs=1, enable_checkpointing=True).fit(Net(), loader(23))
    trainer = quiet(tmp_path, max_epochs=2)
    trainer.fit(Net(), loader(23), ckpt_path="last")
    assert (trainer.global_step, trainer.current_epoch) == (12, 2)


def test_callbacks_resume(tmp_path: Path) -> None:
    """EarlyStopping counts its patience, and ModelCheckpoint its best, over a restart."""
    settings: dict[str, Any] = {"monitor": "val/loss", "mode": "max", "patience": 4}
    whole = EarlyStopping(**settings)
    quiet(tmp_path / "whole", max_epochs=9, callbacks=whole).fit(Net(), loader(23), loader(5))
    for epochs in (2, 9):
        stopping = EarlyStopping(**settings)
        trainer = quiet(
            tmp_path / "parts", max_epochs=epochs, enable_checkpointing=True, callbacks=stopping
        )
        trainer.fit(Net(), loader(23), loader(5), ckpt_path="last" if epochs == 9 else None)
    assert (stopping.wait_count, stopping.best_score) == (whole.wait_count, whole.best_score)


def test_weights_in_double_are_loaded_in_double(tmp_path: Path) -> None:
    """A float64 checkpoint is read as float64, also into a task that was made in float32."""
    task = Net()
    quiet(tmp_path, precision="64-true", enable_checkpointing=True).fit(task, loader(23), loader(5))
    other = Net()
    quiet(tmp_path, precision="64-true").validate(other, loader(5), ckpt_path="last")
    assert torch.equal(weights(other), weights(task))


@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, entry: str) -> None:
    """A checkpoint that does not fit the task is refused; the error names the mismatches."""
    quiet(tmp_path, max_steps=1, enable_checkpointing=True).fit(Net(), loader(23))

    class Wider(Net):
        def make_model(self) -> Any:
            model = super().make_model()
            model[0] = torch.nn.Linear(3, 9)
            return model

    with pytest.raises(
        CheckpointError, match=r"(?s)do not fit this model:\n.*model\.0\.(weight|bias)"
    ):
        getattr(quiet(tmp_path), entry)(Wider(), loader(5), ckpt_path="last")


class Batches:
    """A stream of 20 batches of unknown size."""

    def __iter__(self) -> Any:
        x_NI, y_NO = rows(40).tensors
        yield from ((x_NI[i : i + 2], y_NO[i : i + 2]) for i in range(0, 40, 2))


class Places(Line):
    """Notes which batches of the stream it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note one."""
        self.seen.append(rows(40).tensors[0].tolist().index(batch[0][0].tolist()) // 2)
        return super().training_step(batch, batch_idx)


def test_a_stream_with_another_accumulation_resumes_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the batches are of unknown size, microbatches are counted: none is left out."""
    task = Places()
    quiet(tmp_path, max_steps=6, callbacks=ModelCheckpoint()).fit(Line(), Batches())
    quiet(tmp_path, accumulate_grad_batches=4).fit(task, Batches(), ckpt_path="last")
    assert task.seen == list(range(4, 20))
    assert (
        "step 1 of the epoch comes next, 2 batches of it for the second time"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("accumulate", "said"), [(2, False), (1, True)])
def test_a_stream_on_other_ranks_resumes_where_it_was(
    accumulate: int, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of two ranks takes two of its batches: no batch is trained twice, or left out."""

    def begin(engine: Any) -> None:
        keeper = ModelCheckpoint()
        quiet(tmp_path, engine=engine, max_steps=3, callbacks=keeper).fit(Line(), Batches())

    World(2).run(begin)
    task = Places()
    quiet(tmp_path, accumulate_grad_batches=accumulate).fit(task, Batches(), ckpt_path="last")
    assert task.seen == list(range(6, 20))
    assert ("step 6 of the epoch comes next, 0 batches" in capsys.readouterr().out) == said


class Decaying(Line):
    """A Line with a rate that halves each epoch."""

    def configure_optimizers(self) -> Any:
        """Return SGD and the schedule."""
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_other_settings_of_the_optimizer_hold_from_the_checkpoint_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumes with another rate and weight decay trains with them,
    continues the schedule, and says so.
    """
    saved = quiet(tmp_path, callbacks=ModelCheckpoint(), max_epochs=2)
    saved.fit(Decaying(lr=0.1, weight_decay=0.01), loader(8))
    recorder, task = Recorder(), Decaying(lr=0.01, weight_decay=0.02)
    quiet(tmp_path, callbacks=recorder, max_epochs=4).fit(task, loader(8), ckpt_path="last")
    assert recorder.lrs == pytest.approx([0.0025, 0.0025, 0.00125, 0.00125])
    assert (
        "Changed since the checkpoint: lr 0.1 -> 0.01; weight_decay 0.01 -> 0.02."
        in capsys.readouterr().out
    )
    before, same = Decaying(lr=0.1, weight_decay=0.01), Recorder()
    quiet(tmp_path, callbacks=same, max_epochs=3).fit(before, loader(8), ckpt_path="last")
    assert same.lrs == pytest.approx([0.025, 0.025])
    assert "Changed since" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({"shuffle": True}, {"seed": 2}, "seed was 0, is 2"),
        ({"shuffle": False}, {}, "order was shuffled, is the data set's"),
        ({"shuffle": True, "data": 26}, {}, "samples was 23, is 26"),
    ],
)
def test_another_order_of_an_epoch_that_has_begun_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    settings: dict[str, Any],
    said: str,
) -> None:
    """Its rest has other samples than were left; at an epoch's end the order may change."""
    text = f"Changed since the checkpoint: {said}; the rest of this epoch is of another order"
    for steps in (8, 6):
        folder = tmp_path / str(steps)
        first = quiet(folder, max_steps=steps, callbacks=ModelCheckpoint())
        first.fit(Line(), loader(shuffle=True))
        trainer = quiet(folder, max_steps=9, **settings)
        trainer.fit(Line(), loader(**changed), ckpt_path="last")
        assert (text in capsys.readouterr().out) == (steps == 8)


class Chosen(Line):
    """A Line with an optimizer and a schedule of one's choice."""

    def __init__(self, optimizer: Any, schedule: Any, **when: Any) -> None:
        super().__init__()
        self.optimizer, self.schedule, self.when = optimizer, schedule, when

    def configure_optimizers(self) -> Any:
        """Return them."""
        optimizer = self.optimizer(self.parameters(), lr=0.1)
        config = {"scheduler": self.schedule(optimizer), **self.when}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize("stop_at", [4, 5], ids=["at an epoch's end", "inside one"])
def test_settings_that_change_results_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stop_at: int
) -> None:
    """They hold as given from the checkpoint on, and a line names them, in one order."""
    train(tmp_path, stop_at, data=loader(Noisy(), 3))
    others = {"precision": "bf16-mixed", "gradient_clip_val": None, "limit_train_batches": 6}
    train(tmp_path, 7, "last", loader(Noisy(), 3, drop_last=True), **others)
    assert (
        "Changed since the checkpoint: trainer.precision was 32-true, is bf16-mixed;"
        " trainer.gradient_clip_val was 1.0, is null; trainer.limit_train_batches was null, is 6;"
        " drop_last was False, is True."
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    "limits, line",
    [((None, 1.0), ""), ((1, 1.0), "trainer.limit_train_batches was 1, is null")],
    ids=["all batches", "one batch, then all"],
)
def test_a_limit_of_all_batches_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limits: Any, line: str
) -> None:
    """1.0 is every batch, as null is; 1 is one batch."""
    for start, limit in enumerate(limits):
        whole = {"limit_train_batches": limit, "accumulate_grad_batches": 1}
        train(tmp_path, start + 1, "last" if start else None, **whole)
    printed = capsys.readouterr().out
    assert line in printed and ("limit_train_batches was" in printed) == bool(line)


def test_the_number_of_workers_changes_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with others resumes inside an epoch, and its random augmentation is the same."""
    whole, _ = train(tmp_path / "whole", 7)
    train(tmp_path / "parts", 3)
    data = loader(Noisy(), 3, shuffle=True, num_workers=2)
    resumed, _ = train(tmp_path / "parts", 7, "last", data)
    assert all(map(torch.equal, weights(whole), weights(resumed)))
    assert "Changed since" not in capsys.readouterr().out


def test_another_class_of_optimizer_or_schedule_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate is that of the new curve; an optimizer takes the state that it can use."""
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4)
    first = quiet(tmp_path, callbacks=ModelCheckpoint(), max_epochs=2)
    first.fit(Chosen(torch.optim.Adam, step), loader(8))
    recorder = Recorder()
    second = quiet(tmp_path, callbacks=recorder, max_epochs=3)
    second.fit(Chosen(torch.optim.RAdam, cosine), loader(8), ckpt_path="last")
    assert recorder.lrs == pytest.approx([0.05, 0.05])
    said = capsys.readouterr().out
    assert "CosineAnnealingLR.class StepLR -> CosineAnnealingLR" in said
    assert "optimizer was Adam, is RAdam." in said
    third = quiet(tmp_path, max_epochs=3)
    third.fit(Chosen(torch.optim.Adam, step, interval="step"), loader(8), ckpt_path="last")
    assert "Changed since the checkpoint: StepLR.interval epoch -> step." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (torch.optim.Adam, torch.optim.Adamax, "has no exp_inf, which this run's Adamax needs"),
        (
            torch.optim.Adam,
            partial(torch.optim.Adam, amsgrad=True),
            "has no max_exp_avg_sq, which this run's Adam needs",
        ),
        (
            partial(torch.optim.RMSprop, eps=1e-6),
            partial(torch.optim.RMSprop, centered=True, momentum=0.9),
            "has no grad_avg, momentum_buffer, which this run's RMSprop needs",
        ),
    ],
)
def test_a_state_that_lacks_what_the_optimizer_reads_is_refused(
    before: Any, after: Any, named: str, tmp_path: Path
) -> None:
    """It was torch's KeyError of the first step; other settings of the same state are taken."""
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    quiet(tmp_path, callbacks=ModelCheckpoint()).fit(Chosen(before, step), loader(8))
    with pytest.raises(CheckpointError, match=rf"{named}.*init_weights=CHECKPOINT\.$"):
        quiet(tmp_path, max_epochs=2).fit(Chosen(after, step), loader(8), ckpt_path="last")
    trainer = quiet(tmp_path, max_epochs=2)
    trainer.fit(Chosen(partial(before, eps=1e-7), step), loader(8), ckpt_path="last")
    assert trainer.global_step == 4


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_part_that_is_compiled_resumes_from_one_that_is_not(
    compiled_first: bool, tmp_path: Path
) -> None:
    """And the other way round: names of weights have a part more."""

    class Compiled(Line):
        def make_model(self) -> Any:
            return torch.compile(super().make_model(), backend="eager")

    kinds = (Compiled, Line) if compiled_first else (Line, Compiled)
    first, second = kinds[0](), kinds[1]()
    quiet(tmp_path, max_epochs=1, callbacks=ModelCheckpoint()).fit(first, loader(8))
    quiet(tmp_path).validate(second, loader(8), ckpt_path="last")
    assert torch.equal(weights(first), weights(second))
    quiet(tmp_path, max_epochs=2).fit(second, loader(8), ckpt_path="last")
