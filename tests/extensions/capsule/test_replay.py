"""A failed step is reproduced from its capsule, bit for bit, without the run and its data."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.toy import Line, Net, loader, quiet, rows, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import CrashCapsule, ModelCheckpoint
from trainkit.errors import CheckpointError, ConfigError, DivergenceError
from trainkit.extensions.capsule.folder import Capsule
from trainkit.extensions.capsule.rebuild import _checkpoint_of
from trainkit.extensions.capsule.replay import replay
from trainkit.extensions.capsule.show import show


def poisoned(value: float = float("nan"), index: int = 13, size: int = 24) -> TensorDataset:
    """Return rows of which one has an input that makes the loss non-finite."""
    x_NI, y_NO = rows(size).tensors
    x_NI = x_NI.clone()
    x_NI[index, 1] = value
    return TensorDataset(x_NI, y_NO)


class Drops(Net):
    """Dropout, batch norm, and random numbers of all kinds in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Add noise of torch's, and a factor."""
        x, y = batch
        return super().training_step((x + 0.01 * torch.randn_like(x), y), batch_idx)


def run(tmp_path: Path, task: Any, data: Any, *callbacks: Callback, **settings: Any) -> Path:
    """Train until it diverges; return the only capsule."""
    settings = {
        "stop_on_nonfinite": True,
        "assert_no_sync": not settings.get("stop_on_nonfinite", True),
    } | settings
    trainer = quiet(tmp_path, callbacks=[CrashCapsule(), *callbacks], **settings)
    try:
        trainer.fit(task, loader(data, shuffle=True))
    except DivergenceError:
        assert settings["stop_on_nonfinite"]
    (capsule,) = (tmp_path / "capsules").iterdir()
    return capsule


@pytest.mark.parametrize("stop", [True, False])
def test_a_poisoned_sample_is_found_again(tmp_path: Path, stop: bool) -> None:
    """The losses of the step's microbatches equal the run's bit for bit, dropout included,
    and the sample is named.
    """
    folder = run(
        tmp_path,
        Drops(),
        poisoned(),
        accumulate_grad_batches=3,
        max_epochs=2,
        stop_on_nonfinite=stop,
    )
    done = replay(folder, Drops())
    assert done.is_equal and len(done.losses) == 3
    assert sum(math.isnan(loss) for loss in done.losses) == 1
    assert (done.weights, done.steps_older, done.error) == (
        "those of the step, from the capsule",
        0,
        None,
    )
    assert len(done.bad_inputs) == 1 and done.bad_inputs[0].endswith(": sample 13 of the data set")
    assert done.first_bad is not None
    assert (done.first_bad.name, done.first_bad.kind, done.first_bad.inputs_finite) == (
        "model.0",
        "Linear",
        False,
    )
    assert set(done.bad_gradients) == {name for name, _ in Drops().named_parameters()}
    assert done.bad_weights == [] and done.updated is None


def test_replaying_leaves_no_trace(tmp_path: Path) -> None:
    """The random state is restored, and the run's folder is unchanged."""
    folder = run(tmp_path, Drops(), poisoned())
    files = sorted(tmp_path.rglob("*"))
    task = Drops()
    replay(folder, task)
    assert not any(module._forward_hooks for module in task.modules())
    assert sorted(tmp_path.rglob("*")) == files


def test_with_other_weights_losses_differ(tmp_path: Path) -> None:
    """The comparison is no formality."""
    folder = run(tmp_path, Drops(), poisoned(), accumulate_grad_batches=3, max_epochs=2)
    torch.save(Drops().state_dict(), tmp_path / "other.pt")
    done = replay(folder, Drops(), weights=str(tmp_path / "other.pt"))
    assert not done.is_equal or len(done.losses) < 2
    assert done.steps_older is None


class Logs(Line):
    """Takes the logarithm of a layer's output, which may be negative."""

    def make_model(self) -> nn.Module:
        """Return two layers."""
        return nn.Sequential(nn.Linear(3, 4), Root(), nn.Linear(4, 1))


class Root(nn.Module):
    """A module with a non-finite output for negative inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the root."""
        return x.sqrt()


def test_the_first_module_is_named(tmp_path: Path) -> None:
    """With finite inputs, the module with the first non-finite output is named."""
    done = replay(run(tmp_path, Logs(), rows(8)), Logs())
    assert done.bad_inputs == []
    assert done.first_bad is not None
    assert (done.first_bad.name, done.first_bad.inputs_finite) == ("model.1", True)


def test_an_error_within_a_step_is_raised_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in training_step or backward leaves a capsule; the replay raises it again."""

    class Fails(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch[0][0, 0] == rows(23).tensors[0][8, 0]:
                raise ValueError("a strange sample")
            return super().training_step(batch, batch_idx)

    trainer = quiet(tmp_path, callbacks=[CrashCapsule()])
    with pytest.raises(ValueError, match="a strange sample"):
        trainer.fit(Fails(), loader(23))
    assert "python -m trainkit replay" in capsys.readouterr().out
    (folder,) = (tmp_path / "capsules").iterdir()
    assert folder.name == "step=2-rank=0"
    done = replay(folder, Fails())
    assert isinstance(done.error, ValueError) and done.losses == [] and done.recorded == [None]
    show(done)
    out = capsys.readouterr().out
    assert "ValueError: a strange sample" in out and "training_step" in out


class Late(Callback):
    """Requests a capsule of an earlier step, which was already updated."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Do it at the sixth step."""
        if trainer.global_step == 6:
            capsule = next(c for c in trainer.callbacks if isinstance(c, CrashCapsule))
            assert capsule.keep_step(trainer, 4, "the test says so")
            assert not capsule.keep_step(trainer, 1, "it is gone")


def test_a_step_that_was_updated_takes_the_last_checkpoint(tmp_path: Path) -> None:
    """Without weights a capsule names the last checkpoint, and replay prints its age;
    also if all folders were moved.
    """
    data = rows(24)
    settings = {"stop_on_nonfinite": False, "max_steps": 6, "assert_no_sync": False}
    folder = run(
        tmp_path / "a",
        Drops(),
        data,
        Late(),
        ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1, save_top_k=-1),
        **settings,
    )
    done = replay(folder, Drops())
    assert done.steps_older == 0 and done.is_equal
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = replay(tmp_path / "b" / "capsules" / folder.name, Drops())
    assert again.is_equal and again.weights == str(
        tmp_path / "b" / "checkpoints" / "epoch=0-step=4"
    )


def test_an_older_checkpoint_is_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of steps in between is printed, and that losses differ."""
    settings = {"stop_on_nonfinite": False, "max_steps": 6, "assert_no_sync": False}
    folder = run(
        tmp_path,
        Drops(),
        rows(24),
        Late(),
        ModelCheckpoint(every_n_train_steps=3, every_n_epochs=1, save_top_k=-1),
        **settings,
    )
    done = replay(folder, Drops())
    assert done.steps_older == 1 and not done.is_equal
    show(done)
    out = capsys.readouterr().out
    assert "1 step older than the step: losses differ" in out and "DIFFERENT" in out


def test_a_step_of_the_first_epoch_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first checkpoint a capsule has the weights that training started from;
    the command and replay say so.
    """

    class Bursts(Drops):  # a finite loss; its update makes the weights infinite
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 4:
                for parameter in self.parameters():
                    parameter.grad.fill_(float("inf"))  # type: ignore[union-attr]

    settings = {"stop_on_nonfinite": False, "assert_no_sync": False}
    folder = run(tmp_path, Bursts(), rows(24), ModelCheckpoint(), **settings)
    out = capsys.readouterr().out
    assert (
        f"replay {folder} (with the weights of step 0: there is no checkpoint yet)"
        in out.replace("\n", " ")
    )
    assert folder.name == "step=4-rank=0"
    done = replay(folder, Bursts())
    assert (done.weights, done.steps_older) == (
        "those of the start of training, from the capsule",
        4,
    )
    assert len(done.losses) == 1 and done.error is None
    show(done)
    assert "4 steps older than the step: losses differ" in capsys.readouterr().out


def test_the_start_is_released_at_the_first_checkpoint(tmp_path: Path) -> None:
    """The copy of the starting weights is held until a checkpoint is newer."""
    capsule, held = CrashCapsule(), list[bool]()

    class Look(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            trainer.checkpoints.finish()
            held.append(capsule._start is not None)

    keeper = ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)
    quiet(tmp_path, callbacks=[capsule, Look(), keeper], max_steps=6).fit(Line(), loader(24))
    assert held[0] and not held[-1]


def test_without_any_weights_it_says_what_to_give(tmp_path: Path) -> None:
    """Without a checkpoint or weights there is nothing to compute with,
    as in capsules of earlier versions.
    """
    settings = {"stop_on_nonfinite": False, "max_steps": 6, "assert_no_sync": False}
    folder = run(tmp_path, Drops(), rows(24), Late(), **settings)
    about = json.loads((folder / "manifest.json").read_text())
    del about["files"]["weights.safetensors"], about["weights_step"]
    (folder / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(
        CheckpointError, match=r"has no weights .* Pass weights=FOLDER or FILE\. With"
    ):
        replay(folder, Drops())


def test_the_update_is_that_of_the_run(tmp_path: Path) -> None:
    """With one rank, and weights and optimizer of the step,
    the update gives the run's next weights bit for bit.
    """

    class At4(Late):
        def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
            if trainer.global_step == 4:
                trainer.callbacks[0].keep_step(trainer, 4, "the test says so")

        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            if trainer.global_step == 5:
                self.after = weights(task)

    look = At4()
    settings = {
        "stop_on_nonfinite": False,
        "lr_warmup_steps": 10,
        "gradient_clip_val": 0.1,
        "assert_no_sync": False,
    }
    folder = run(tmp_path, Drops(lr=0.2), rows(24), look, **settings)
    task = Drops(lr=7.0)
    done = replay(folder, task, update=True)
    assert done.is_equal and done.updated is True
    assert torch.equal(weights(task), look.after)
    assert {"lr": 0.1}.items() <= torch.load(folder / "step.pt", weights_only=True)["groups"][0][
        0
    ].items()


def test_modes_and_frozen_weights_are_put_back(tmp_path: Path) -> None:
    """A norm in eval mode and frozen weights are so again."""

    class Frozen(Drops):
        def freeze(self) -> None:
            self.model[1].eval()
            self.model[0].requires_grad_(False)

    class Freezes(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            task.freeze()

    folder = run(tmp_path, Frozen(), poisoned(), Freezes(), accumulate_grad_batches=3, max_epochs=2)
    done = replay(folder, Frozen())
    assert done.is_equal
    assert not any(name.startswith("model.0") for name in done.bad_gradients)


def test_overrides_change_the_trainer_alone_where_a_task_is_given(tmp_path: Path) -> None:
    """Another precision gives another loss;
    settings irrelevant to a step, or of a given task, are refused.
    """
    folder = run(tmp_path, Drops(), poisoned(), accumulate_grad_batches=3, max_epochs=2)
    done = replay(folder, Drops(), overrides={"trainer": {"precision": "64-true"}})
    assert not done.is_equal and len(done.losses) == 3
    with pytest.raises(
        ConfigError,
        match=r"trainer\.max_epochs is not a setting\..*Known here: benchmark, channels_last",
    ):
        replay(folder, Drops(), overrides={"trainer": {"max_epochs": 3}})
    with pytest.raises(ConfigError, match="overrides has task, but the task is given"):
        replay(folder, Drops(), overrides={"task": {"lr": 1}})


def test_products_of_float32_are_rounded_as_in_the_run(tmp_path: Path) -> None:
    """The setting holds for the repeated step, too."""
    seen: list[str] = []

    class Looks(Drops):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.get_float32_matmul_precision())
            return super().training_step(batch, batch_idx)

    folder = run(tmp_path, Drops(), poisoned(), float32_matmul_precision="high")
    replay(folder, Looks())
    assert set(seen) == {"high"}


def test_another_task_is_refused(tmp_path: Path) -> None:
    """Weights that do not fit are named."""
    with pytest.raises(CheckpointError, match=r"does not fit|Nothing in .* fits"):
        replay(run(tmp_path, Drops(), poisoned()), Line())


def test_a_run_from_code_needs_its_task(tmp_path: Path) -> None:
    """Without a config the task must be passed; the error shows how."""
    with pytest.raises(
        CheckpointError,
        match=(
            r"has no config to build the Task from.*trainkit\.replay\('.*', task=Drops\(\.\.\.\)\)"
        ),
    ):
        replay(run(tmp_path, Drops(), poisoned()))


def test_pdb_stops_before_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debugger is entered once for each microbatch, before the step runs."""
    calls: list[str] = []

    class Listed(Drops):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append("step")
            return super().training_step(batch, batch_idx)

    folder = run(tmp_path, Drops(), poisoned(), accumulate_grad_batches=2)
    monkeypatch.setattr("sys.breakpointhook", lambda: calls.append("stop"))
    replay(folder, Listed(), pdb=True)
    assert calls == ["stop", "step"] * (len(calls) // 2) and calls


def test_fp16_takes_its_loss_scale_along(tmp_path: Path) -> None:
    """The loss scale is that of the step, and gradients are printed without it."""
    settings = {
        "stop_on_nonfinite": False,
        "max_steps": 6,
        "assert_no_sync": False,
        "precision": "16-mixed",
    }
    folder = run(
        tmp_path,
        Drops(),
        rows(24),
        Late(),
        ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1, save_top_k=-1),
        **settings,
    )
    scale = torch.load(folder / "step.pt", weights_only=True)["scaler"]["scale"]
    assert 1024 <= scale < 65536  # the first steps overflow at the scale that fp16 begins with
    done = replay(folder, Drops())
    plain = replay(folder, Drops(), overrides={"trainer": {"precision": "32-true"}})
    sound = {name: norm for name, norm in done.gradients.items() if name not in done.bad_gradients}
    assert done.is_equal and len(sound) >= 4
    assert sound == pytest.approx(
        {name: plain.gradients[name] for name in sound}, rel=0.05, abs=1e-3
    )


def test_where_the_named_checkpoint_is_gone_the_nearest_is_taken(tmp_path: Path) -> None:
    """Checkpoints are rotated: of the remaining ones,
    an earlier one is preferred to a later one.
    """
    settings = {"stop_on_nonfinite": False, "max_steps": 6, "assert_no_sync": False}
    folder = run(
        tmp_path,
        Drops(),
        rows(24),
        Late(),
        ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1, save_top_k=-1),
        **settings,
    )
    for step, older in ((4, 0), (3, 1), (2, 2), (1, 3), (5, -1)):
        assert replay(folder, Drops()).steps_older == older
        shutil.rmtree(tmp_path / "checkpoints" / f"epoch=0-step={step}")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(
        CheckpointError,
        match=r"which does not exist any more, and .* has no other\. Pass weights of about step 4",
    ):
        replay(folder, Drops())


def test_what_is_shown_names_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page names step, weights, loss, the sample, the module and gradients."""
    folder = run(tmp_path, Drops(), poisoned())
    show(replay(folder, Drops()))
    out = capsys.readouterr().out
    for words in (
        "of rank 0 of 1: the loss is nan",
        "those of the step, from the capsule",
        "recorded nan, now nan: equal bit for bit",
        "sample 13 of the data set",
        (
            "the first module with a non-finite output is model.0 (Linear); its inputs were not"
            " finite either"
        ),
        "non-finite gradients: model.0.weight",
        "largest activations",
        "largest gradient norms",
    ):
        assert words in out
    about = json.loads((folder / "manifest.json").read_text())
    assert 13 in about["microbatches"][0]["samples"] and about["microbatches"][0]["loss"] == "nan"


def test_with_a_checkpoint_of_the_step_the_optimizer_continues(tmp_path: Path) -> None:
    """Momentum is the checkpoint's: the update leads to the run's next weights bit for bit."""
    after: list[Tensor] = []

    class At5(Late):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            super().on_train_step_end(trainer, task)
            if trainer.global_step == 5:
                after.append(weights(task))

    settings = {"stop_on_nonfinite": False, "max_steps": 6, "assert_no_sync": False}
    keeper = ModelCheckpoint(every_n_train_steps=4, every_n_epochs=1, save_top_k=-1)
    folder = run(tmp_path, Drops(momentum=0.9), rows(24), At5(), keeper, **settings)
    task = Drops(momentum=0.9)
    done = replay(folder, task, update=True)
    assert done.is_equal and done.updated and torch.equal(weights(task), after[0])


def test_nothing_is_downloaded(tmp_path: Path) -> None:
    """prepare_data is not called: the batches are in the capsule."""

    class Offline(Drops):
        def prepare_data(self) -> None:
            raise RuntimeError("there is no network")

    assert replay(run(tmp_path, Drops(), poisoned()), Offline()).is_equal


def test_a_url_in_a_manifest_is_opened_with_trust_only(tmp_path: Path) -> None:
    """A capsule from elsewhere makes no connection."""
    capsule = Capsule(tmp_path, {"checkpoint": "http://evil\x1b[2J/x", "step": 1, "files": {}}, {})
    with pytest.raises(CheckpointError, match="is not opened without trust") as caught:
        _checkpoint_of(capsule, trusted=False)
    assert "\x1b" not in str(caught.value)
    assert _checkpoint_of(capsule, trusted=True).startswith("http://evil")
