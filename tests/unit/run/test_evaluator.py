"""Validation, test and prediction: each sample once, exactly, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import trainkit
from tests.helpers.threads import World
from tests.helpers.toy import Line, Net, loader, quiet, rows
from trainkit.errors import CheckpointError, ConfigError, DataError, TaskError


class Echo(Line):
    """Predicts its inputs' first column."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the numbers that came in."""
        return batch[0][:, 0]


class Rows(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(10)
        yield from (data[i] for i in range(10))


@pytest.mark.parametrize("entry", ["validate", "test"])
def test_a_value_is_the_mean_over_all_samples(tmp_path: Path, entry: str) -> None:
    """The logged value is the exact mean over all samples, short last batch included."""
    task = Line()
    values = getattr(quiet(tmp_path, precision="64-true"), entry)(task, loader(23))
    x_NI, y_NO = (t.double() for t in rows(23).tensors)
    assert values == {
        "val/loss": pytest.approx(functional.mse_loss(task(x_NI), y_NO).item(), rel=1e-14)
    }


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"drop_last": True}, {"batch_size": 7}, {"num_workers": 1}]
)
def test_evaluation_sees_each_sample_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever the loader's options, each sample is evaluated once: nothing is dropped."""
    seen: list[float] = []

    class Look(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[0][:, 0].tolist())

    quiet(tmp_path).validate(Look(), loader(23, **options))
    assert sorted(seen) == sorted(rows(23).tensors[0][:, 0].tolist())


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": 7}, {"num_workers": 2}])
def test_predictions_come_in_the_data_sets_order(tmp_path: Path, options: dict[str, Any]) -> None:
    """Predictions of all batches come in the order of the data set,
    with any options of the loader.
    """
    predictions = quiet(tmp_path).predict(Echo(), loader(23, **options))
    assert torch.cat(predictions).tolist() == rows(23).tensors[0][:, 0].tolist()


def test_predictions_are_written_as_they_come(tmp_path: Path) -> None:
    """Each batch is on the disk before the next is computed;
    read back they are in order, and none stays in memory.
    """
    there: list[int] = []
    folder = tmp_path / "run" / "predictions"

    class Look(Echo):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            there.append(len(list(folder.glob("*.pt"))))
            return super().predict_step(batch, batch_idx)

    trainer = quiet(tmp_path / "run")
    for count in (23, 9):  # the second run leaves nothing of the first
        there.clear()
        assert (
            trainer.predict(Look(), loader(count), return_predictions=False, write_to=True) is None
        )
        assert there == list(range(-(-count // 4)))
        assert (
            torch.cat(list(trainkit.read_predictions(folder))).tolist()
            == rows(count).tensors[0][:, 0].tolist()
        )
    kept = trainer.predict(Echo(), loader(9), write_to=tmp_path / "other")
    assert torch.equal(
        torch.cat(kept), torch.cat(list(trainkit.read_predictions(tmp_path / "other")))
    )  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"nothing holds no predictions\. `python -m trainkit predict"
    ):
        list(trainkit.read_predictions(tmp_path / "nothing"))


@dataclasses.dataclass
class Answer:
    """What a model of one's own may return."""

    scores: Any
    name: str = "a"


def test_predictions_of_any_usual_kind_can_be_read(tmp_path: Path) -> None:
    """Arrays become tensors, dataclasses dicts; what could not be read is refused before hours."""

    class Kinds(Line):
        def __init__(self, made: Any) -> None:
            super().__init__()
            self.made = made

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.made

    array = np.arange(3.0)
    others = [tmp_path / "7.pt", tmp_path / "2024-11-30.pt"]
    for path in others:
        torch.save(1, path)
    quiet(tmp_path).predict(
        Kinds({"a": array, "b": (np.float32(2), Answer([array]))}), loader(2), write_to=tmp_path
    )
    (read,) = trainkit.read_predictions(tmp_path)
    assert read["a"].tolist() == [0, 1, 2] and read["b"][0] == 2.0 and type(read["b"][0]) is float
    assert read["b"][1]["scores"][0].tolist() == [0, 1, 2] and read["b"][1]["name"] == "a"
    with pytest.raises(TaskError, match=r"predict_step returns a PosixPath.* Return tensors, arr"):
        quiet(tmp_path).predict(Kinds([tmp_path]), loader(2), write_to=tmp_path)
    assert all(path.is_file() for path in others)
    torch.save(tmp_path, tmp_path / "000000000000-00000.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        list(trainkit.read_predictions(tmp_path))


def test_predictions_are_of_the_forward_pass_by_default(tmp_path: Path) -> None:
    """Without a predict_step the model's answer to the inputs is predicted,
    from batches and from bare tensors.
    """
    task = Line()
    x_NI = rows(6).tensors[0]
    for data in (rows(6), [x_NI[:4], x_NI[4:]]):
        given = DataLoader(data, 4) if isinstance(data, TensorDataset) else data
        assert torch.equal(torch.cat(quiet(tmp_path).predict(task, given)), task(x_NI))


def test_a_stream_is_evaluated_to_its_end(tmp_path: Path) -> None:
    """A stream without length is evaluated and predicted on until it ends."""
    trainer = quiet(tmp_path)
    assert (
        torch.cat(trainer.predict(Echo(), DataLoader(Rows(), 4))).tolist()
        == rows(10).tensors[0][:, 0].tolist()
    )
    assert trainer.validate(Line(), DataLoader(Rows(), 4)) == pytest.approx(
        trainer.validate(Line(), loader(10)), rel=1e-6
    )


def test_several_loaders_have_values_of_their_own(tmp_path: Path) -> None:
    """A list of loaders gives each its own values, named by its place."""
    trainer = quiet(tmp_path)
    values = trainer.validate(Line(), [loader(8), loader(23)])
    for place, data in enumerate((loader(8), loader(23))):
        assert (
            values[f"val/loss/dataloader_idx_{place}"] == trainer.validate(Line(), data)["val/loss"]
        )


def test_hooks_receive_the_number_of_the_loader(tmp_path: Path) -> None:
    """Batch hooks get the loader's place."""
    from trainkit.api.callback import Callback

    places: list[tuple[int, int]] = []

    class Look(Callback):
        def on_test_batch_start(
            self, trainer: Any, task: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            places.append((batch_idx, dataloader_idx))

    quiet(tmp_path, callbacks=Look()).test(Line(), [loader(8), loader(4)])
    assert places == [(0, 0), (1, 0), (0, 1)]


def test_predicting_on_several_loaders_is_refused(tmp_path: Path) -> None:
    """predict takes one loader: a second would be left out in silence."""
    with pytest.raises(ConfigError, match=r"predict takes one loader, and got 2"):
        quiet(tmp_path).predict(Echo(), [loader(8), loader(4)])


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    """Weights and buffers are as before, and dropout is off."""
    task = Net()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    trainer = quiet(tmp_path)
    assert trainer.validate(task, loader(23)) == trainer.validate(task, loader(23))
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())


def test_what_validation_made_can_be_trained_with(tmp_path: Path) -> None:
    """A tensor that a model caches at its first use, in validation, works for training too."""

    class Caches(Line):
        table: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.ones(1) * 0.5
            return super().forward(x) * self.table

    quiet(tmp_path, num_sanity_val_steps=1).fit(Caches(), loader(8), loader(4))


@pytest.mark.parametrize(("limit", "seen"), [(2, 8), (0.5, 11), (1.0, 23), (99, 23)])
def test_limits_are_counts_or_shares(tmp_path: Path, limit: float, seen: int) -> None:
    """limit_*_batches limits the evaluation, in batches or as a share of the data."""
    limits = {f"limit_{kind}_batches": limit for kind in ("val", "test", "predict")}
    trainer, counted = quiet(tmp_path, **limits), []

    class Count(Echo):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            counted.append(len(batch[0]))

    assert sum(len(p) for p in trainer.predict(Count(), loader(23))) == seen
    trainer.validate(Count(), loader(23))
    trainer.test(Count(), loader(23))
    assert sum(counted) == 2 * seen


@pytest.mark.parametrize(
    ("entry", "kind"), [("validate", "val"), ("test", "test"), ("predict", "predict")]
)
def test_no_data_raises(tmp_path: Path, entry: str, kind: str) -> None:
    """Without data an entry point raises; the error says what to pass or define."""
    with pytest.raises(
        ConfigError,
        match=rf"There is no data to {entry} on: pass dataloaders, or define {kind}_dataloader",
    ):
        getattr(quiet(tmp_path), entry)(Line())
    with pytest.raises(ConfigError, match=rf"^trainer\.limit_{kind}_batches is 0, and leaves"):
        getattr(quiet(tmp_path, **{f"limit_{kind}_batches": 0}), entry)(Line(), loader(4))


class InEval(Line):
    """A line, with a batch norm that the user keeps in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1].eval()
        self.modes: list[bool] = []

    def make_model(self) -> nn.Module:
        """Return the line and its norm."""
        return nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note the norm's mode."""
        self.modes.append(self.model[1].training)
        return super().training_step(batch, batch_idx)


def test_a_part_in_eval_stays_in_eval(tmp_path: Path) -> None:
    """Validation puts every module back into the mode that the user gave it."""
    task = InEval()
    quiet(tmp_path, max_epochs=2).fit(task, loader(16), loader(16))
    assert task.modes == [False] * 8
    assert task.model[0].training


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_a_mode_that_the_first_hook_sets_holds(tmp_path: Path, entry: str) -> None:
    """As of layers that scale otherwise in training."""
    seen: list[tuple[bool, bool]] = []

    class Modes(Line):
        def on_validation_start(self) -> None:
            self.model.train()

        on_test_start = on_predict_start = on_validation_start

        def forward(self, x: Any) -> Any:
            seen.append((self.training, self.model.training))
            return super().forward(x)

        test_step = Line.validation_step

    task = Modes().eval()
    getattr(quiet(tmp_path), entry)(task, loader(4))
    assert seen == [(False, True)]
    assert not task.model.training


def test_a_step_that_asks_for_the_loader_is_refused(tmp_path: Path) -> None:
    """validation_step with dataloader_idx gets the number of the loader."""

    class Several(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("which", float(dataloader_idx))

    values = quiet(tmp_path).validate(Several(), [loader(8), loader(8)])
    assert values == {"which/dataloader_idx_0": 0.0, "which/dataloader_idx_1": 1.0}


def test_a_fit_after_a_prediction_trains(tmp_path: Path) -> None:
    """predict and validate leave each module in the mode that it was in,
    also where they end with an error.
    """

    class Breaks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ValueError("broken")

    task = Breaks()
    task.model[3].eval()
    quiet(tmp_path).predict(task, loader(8))
    assert [task.training, task.model[1].training, task.model[3].training] == [True, True, False]
    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path).validate(task, loader(8))
    assert [task.training, task.model[1].training, task.model[3].training] == [True, True, False]


def test_loaders_of_a_dict_have_names(tmp_path: Path) -> None:
    """A dict of validation loaders names the values of each, in a fit too."""
    trainer, data = quiet(tmp_path, max_epochs=1), {"near": loader(6), "far": loader(9)}
    values = trainer.validate(Line(), data)
    assert values == {
        f"val/loss/{name}": trainer.validate(Line(), own)["val/loss"] for name, own in data.items()
    }
    trainer.fit(Line(), loader(8), data)
    assert {"val/loss/near", "val/loss/far"} <= trainer.callback_metrics.keys()


def test_outputs_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    """All ranks get the outputs of all; those of a class inside a function cannot be sent."""

    class Output:
        """Of pytorch-forecasting's kind."""

    class Local(Line):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return Output()

    def predict(engine: Any) -> object:
        trainer = quiet(tmp_path, engine=engine)
        with pytest.raises(TaskError, match=r"Local\.predict_step returned .*Output.*Return tens"):
            trainer.predict(Local(), loader(8))
        return trainer.predict(Local(), loader(8), return_predictions=False)

    assert World(2).run(predict) == [None, None]
    assert len(quiet(tmp_path).predict(Local(), loader(8)) or []) == 2


class Statistics(Line):
    """A buffer that differs from rank to rank, as BatchNorm's statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistic", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Let each rank have its own."""
        self.statistic.fill_(self.trainer.global_rank + 1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log what evaluates."""
        self.log("val/statistic", self.statistic.mean())


def test_rank_0s_buffers_are_evaluated(tmp_path: Path) -> None:
    """All ranks validate with the statistics that the checkpoint will have."""

    def fit(engine: Any) -> float:
        trainer = quiet(tmp_path, max_epochs=1, engine=engine)
        trainer.fit(Statistics(), loader(8), loader(8))
        return float(trainer.callback_metrics["val/statistic"])

    assert World(2).run(fit) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shuffle": True}, "shuffle=True without"),
        ({"shuffle": True, "drop_last": True}, "shuffle=True and drop_last=True without"),
        ({"sampler": RandomSampler(rows(), replacement=True)}, None),
        ({}, None),
    ],
)
def test_what_an_evaluation_does_not_do_is_named(
    options: dict[str, Any],
    named: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each sample counts once, in the data set's order, whatever the loader says; a line says so."""
    quiet(tmp_path).validate(Line(), loader(23, 4, **options), verbose=False)
    out = capsys.readouterr().out
    assert out.count("without effect: an evaluation takes each sample once") == (named is not None)
    assert named is None or f"val_dataloaders: {named}" in out or f"dataloaders: {named}" in out
