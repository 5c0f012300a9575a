"""StochasticWeightAveraging: the rate, the average, batch norm's statistics,
the checkpoint at the end, and resuming.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, update_bn

from tests.extensions.swa.falling import Falling
from tests.helpers.toy import Line, Net, Recorder, compile_with, loader, quiet, rows, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import ModelCheckpoint, StochasticWeightAveraging
from trainkit.errors import ConfigError


class Ends(Callback):
    """Records the weights at each epoch's end."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        """An epoch has ended."""
        self.found.append(weights(task))


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("annealing_epochs", [0, 3])
def test_the_rate_is_that_of_torch(tmp_path: Path, annealing_epochs: int, strategy: Any) -> None:
    """From the start on each epoch's rate is SWALR's, times the factor;
    the scheduler has moved it until then.
    """
    recorder = Recorder()
    swa = StochasticWeightAveraging(0.02, 3, annealing_epochs, strategy)
    settings: dict[str, Any] = {"max_epochs": 7, "lr_reference_batch_size": 2}  # a factor of 2
    quiet(tmp_path, callbacks=[swa, recorder], **settings).fit(Falling(), loader(12))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05 * 0.9**6 * 2)
    swalr = SWALR(optimizer, 0.02 * 2, annealing_epochs, strategy)
    expected = [0.05 * 2 * 0.9**step for step in range(6)]
    for epoch in range(5):
        if epoch or not annealing_epochs:
            optimizer.step()
            swalr.step()
        expected += [optimizer.param_groups[0]["lr"]] * 3
    assert recorder.lrs == pytest.approx(expected, rel=1e-12)


def test_the_end_is_the_average_with_its_own_statistics(tmp_path: Path) -> None:
    """The task ends with the mean of the last epochs' weights,
    and with the statistics that torch's update_bn gives it.
    """

    class Dry(Falling):
        """Without dropout, which update_bn would leave on."""

        def make_model(self) -> Any:
            model = super().make_model()
            model[3] = torch.nn.Identity()
            return model

    task, ends = Dry(), Ends()
    settings: dict[str, Any] = {"max_epochs": 5, "precision": "64-true"}
    quiet(tmp_path, callbacks=[StochasticWeightAveraging(0.05, 0.6), ends], **settings).fit(
        task, loader(24)
    )
    assert torch.allclose(weights(task), torch.stack(ends.found[2:]).mean(0), rtol=0, atol=1e-15)
    own = {name: buffer.clone() for name, buffer in task.named_buffers()}
    update_bn([x.double() for x in rows(24).tensors[0].split(4)], task.model)
    for name, buffer in task.named_buffers():
        assert torch.allclose(own[name], buffer, rtol=1e-12, atol=1e-14), name
    assert all(module.training for module in task.modules())
    assert task.model[1].momentum == 0.1


def test_training_is_as_without_until_it_begins(tmp_path: Path) -> None:
    """Before the start nothing changes; until the end, validation uses the trained weights."""
    ends = [Ends(), Ends()]
    quiet(tmp_path, max_epochs=3, callbacks=ends[0]).fit(Falling(), loader(23))
    quiet(tmp_path, max_epochs=4, callbacks=[ends[1], StochasticWeightAveraging(0.5, 4)]).fit(
        Falling(), loader(23)
    )
    assert all(torch.equal(a, b) for a, b in zip(ends[0].found, ends[1].found, strict=False))


@pytest.mark.parametrize("monitor", [None, "val/loss"])
def test_the_last_checkpoint_holds_the_average(tmp_path: Path, monitor: str | None) -> None:
    """weights.safetensors of `last` is the average, and the value at the end belongs to it."""
    task = Falling()
    callbacks = [StochasticWeightAveraging(0.05, 0.5), ModelCheckpoint(monitor=monitor)]
    trainer = quiet(tmp_path, max_epochs=4, callbacks=callbacks)
    trainer.fit(task, loader(23), loader(5))
    file = load_file(tmp_path / "checkpoints" / "last" / "weights.safetensors")
    assert all(torch.equal(file[name], value) for name, value in task.state_dict().items())
    values = quiet(tmp_path).validate(Falling(), loader(5), ckpt_path="last")
    assert values["val/loss"] == pytest.approx(trainer.callback_metrics["val/loss"], rel=1e-6)


@pytest.mark.parametrize("stop_at", [5, 12, 13, 18, 20])
def test_going_on_changes_no_bit(tmp_path: Path, stop_at: int) -> None:
    """Stopped before, at and after its start,
    the run ends with the bits of the run that never stopped.
    """
    ends = []
    for name, steps in (("whole", [24]), ("parts", [stop_at, 24])):
        lrs: list[float] = []
        for steps_now in steps:
            task, recorder = Falling(), Recorder()
            callbacks = [StochasticWeightAveraging(0.05, 0.5, 3), recorder, ModelCheckpoint()]
            trainer = quiet(tmp_path / name, max_epochs=4, max_steps=steps_now, callbacks=callbacks)
            ckpt_path = "last" if len(steps) > 1 and steps_now == 24 else None
            trainer.fit(task, loader(23, shuffle=True), loader(5), ckpt_path=ckpt_path)
            lrs += recorder.lrs
        ends.append((task.state_dict(), lrs, trainer.callback_metrics))
    (whole, lrs_whole, values), (parts, lrs_parts, values_parts) = ends
    assert lrs_whole == lrs_parts
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert values == values_parts


def test_more_epochs_continue_averaging(tmp_path: Path) -> None:
    """A run that ended with its average resumes from the trained weights,
    and averaging continues.
    """
    task, ends = Falling(), Ends()
    # by the new share it would begin with the fourth
    for epochs, ckpt_path in ((2, None), (8, "last")):
        task = Falling()
        callbacks = [StochasticWeightAveraging(0.05, 0.5), ends, ModelCheckpoint()]
        settings: dict[str, Any] = {
            "max_epochs": epochs,
            "precision": "64-true",
            "callbacks": callbacks,
        }
        quiet(tmp_path, **settings).fit(task, loader(23), ckpt_path=ckpt_path)
    assert torch.allclose(weights(task), torch.stack(ends.found).mean(0), rtol=0, atol=1e-15)


def test_frozen_statistics_stay(tmp_path: Path) -> None:
    """A batch norm in eval mode keeps its statistics,
    and the random states of training do not change.
    """

    class Frozen(Falling):
        def on_train_epoch_start(self) -> None:
            self.model[1].eval()

    task = Frozen()
    before = task.model[1].running_mean.clone()
    quiet(tmp_path, max_epochs=2, callbacks=StochasticWeightAveraging(0.05, 1)).fit(
        task, loader(23)
    )
    assert torch.equal(task.model[1].running_mean, before)
    assert not task.model[1].training


def test_a_compiled_model_gets_its_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass reaches the norms of torch.compile'd modules, without a recompilation."""
    variances, graphs = [], [0, 0]
    for i, averaged in enumerate((False, True, True)):
        torch.compiler.reset()
        task = Net()

        def compile_graph(graph: Any, inputs: Any, i: int = i) -> Any:
            graphs[i] += 1
            return graph.forward

        callbacks = StochasticWeightAveraging(0.05, 0.0) if averaged else None
        with monkeypatch.context() as patch:
            compile_with(patch, compile_graph)
            quiet(tmp_path, max_epochs=1, callbacks=callbacks, compile=i < 2).fit(task, loader(23))
        variances.append(task.model[1].running_var)
    torch.testing.assert_close(variances[1], variances[2])
    assert graphs[0] == graphs[1] > 0


def test_a_run_that_ends_before_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a whole epoch there is no average, which is reported;
    the rate and its factor are printed at the start.
    """
    quiet(tmp_path, max_epochs=9, max_steps=7, callbacks=StochasticWeightAveraging(0.05, 2)).fit(
        Line(), loader(23)
    )
    out = capsys.readouterr().out
    assert (
        "SWA from epoch 2: learning rate 0.1 -> 0.05 x 1 = 0.05 over 10 epochs (cos); the"
        " schedulers stop." in out
    )
    assert "SWA: the run ended before the end of epoch 2: there is no average." in out


@pytest.mark.parametrize(
    ("settings", "trainer", "words"),
    [
        ({"swa_lrs": 0.0}, {}, r"swa_lrs is 0\.0; it must be a number above 0 or a list"),
        ({"swa_lrs": [0.1, -1.0]}, {}, "swa_lrs is"),
        (
            {"swa_lrs": [0.1, 0.1]},
            {},
            r"swa_lrs has 2 rates, and the optimizers have 1 parameter groups",
        ),
        (
            {"swa_lrs": 0.1, "swa_epoch_start": 1.5},
            {},
            r"swa_epoch_start is 1\.5; it must be a whole number",
        ),
        (
            {"swa_lrs": 0.1, "swa_epoch_start": 5},
            {},
            r"swa_epoch_start is 5, and trainer\.max_epochs is 4: .* never begin",
        ),
        (
            {"swa_lrs": 0.1},
            {"max_epochs": None, "max_steps": 5},
            r"swa_epoch_start is 0\.8, a fraction of trainer\.max_epochs",
        ),
        (
            {"swa_lrs": 0.1, "annealing_strategy": "sin"},
            {},
            "annealing_strategy is 'sin'; it must be one of 'cos', 'linear'",
        ),
        ({"swa_lrs": 0.1, "annealing_epochs": -1}, {}, "annealing_epochs is -1"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: Any, trainer: Any, words: str) -> None:
    """An illegal setting is refused with the legal range, before the first step."""
    task = Line()
    with pytest.raises(ConfigError, match=words):
        quiet(
            tmp_path, **{"max_epochs": 4} | trainer, callbacks=StochasticWeightAveraging(**settings)
        ).fit(task, loader(8))
    assert torch.equal(weights(task), weights(Line()))


def test_a_quick_try_averages_its_one_epoch(tmp_path: Path) -> None:
    """fast_dev_run trains one epoch of a run in which averaging begins later, and averages it."""
    swa = StochasticWeightAveraging(0.02, 5)
    quiet(tmp_path, callbacks=[swa], max_epochs=10, fast_dev_run=True).fit(Net(), loader(12))
    assert swa._average is not None and swa._average.num_updates == 1


def test_whole_numbers_are_not_averaged(tmp_path: Path) -> None:
    """A table of indices among the parameters stays as it is."""
    task = Line()
    task.places = nn.Parameter(torch.arange(3), requires_grad=False)
    quiet(tmp_path, max_epochs=3, callbacks=StochasticWeightAveraging(0.05, swa_epoch_start=0)).fit(
        task, loader(8), loader(5)
    )
    assert task.places.tolist() == [0, 1, 2]
