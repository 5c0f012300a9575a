"""Values and names that users of Lightning write:
taken where they mean something, else answered.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.callbacks import EarlyStopping
from trainkit.config.schema import check
from trainkit.errors import ConfigError
from trainkit.loggers import CSVLogger, TensorBoardLogger
from trainkit.run.run import Run
from trainkit.trainer import Trainer


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("bf16", "bf16-mixed"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        (32, "32-true"),
        ("64", "64-true"),
        (None, "32-true"),
    ],
)
def test_short_precisions_are_taken(written: Any, meant: str, tmp_path: Path) -> None:
    """Lightning's short names of precisions mean what they mean there; configs take them too."""
    assert quiet(tmp_path, precision=written).options.numerics.precision == meant
    check(_config(precision=written), "fit", [])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_epochs", -1),
        ("gradient_clip_val", 0),
        ("num_sanity_val_steps", -1),
        ("deterministic", "warn"),
    ],
)
def test_configs_take_them_too(setting: str, value: Any) -> None:
    """The check of a config accepts what the Trainer accepts."""
    check(_config(**{setting: value}), "fit", [])


def _config(**trainer: Any) -> dict[str, Any]:
    task = {"_target_": "tests.helpers.toy.Line"}
    return {
        "task": task,
        "trainer": {"max_epochs": 1} | trainer,
        "run_dir": ".",
        "trust": ["tests.helpers.toy"],
    }


def test_null_and_zero_mean_lightnings_defaults(tmp_path: Path) -> None:
    """Also a stop that a script requests of its own Trainer."""
    names = (
        "enable_progress_bar",
        "enable_checkpointing",
        "enable_model_summary",
        "log_every_n_steps",
    )
    given = Trainer(max_epochs=1, overfit_batches=0, **dict.fromkeys(names))
    assert given.options.limits.log_every_n_steps == 50
    assert given.options.batch.limit_train_batches is None
    assert {"ProgressBar", "ModelCheckpoint", "Banner"} <= {
        type(callback).__name__ for callback in given.callbacks
    }

    class Stop(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outer.should_stop = True
            return super().training_step(batch, batch_idx)

    outer = quiet(tmp_path, max_epochs=3)
    outer.fit(Stop(), loader(8))
    assert (outer.global_step, outer.should_stop) == (1, True)


def test_a_limit_of_1_0_is_all_of_a_stream_too(tmp_path: Path) -> None:
    """Lightning's own default, which templates write out."""

    class Flow(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(loader(8))

    limits = dict.fromkeys(("limit_train_batches", "limit_val_batches"), 1.0)
    trainer = quiet(tmp_path, **limits)
    data = DataLoader(Flow(), batch_size=None)
    trainer.fit(Line(), data, data)
    assert trainer.global_step == 2


def test_a_hook_may_ask_whether_it_is_a_quick_try(tmp_path: Path) -> None:
    """trainer.fast_dev_run is the number of batches, and 0 in other fits."""
    seen = []

    class Asks(Line):
        def on_train_start(self) -> None:
            seen.append(self.trainer.fast_dev_run)  # type: ignore[attr-defined]

    for quick in (True, 3, False):
        quiet(tmp_path, fast_dev_run=quick, max_epochs=1).fit(Asks(), loader(8))
    assert seen == [1, 3, 0]


def test_no_limit_of_epochs_trains_until_a_stop(tmp_path: Path) -> None:
    """With max_epochs=-1 nothing but a request ends the run; max_steps still limits it."""

    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            if trainer.current_epoch == 4:
                trainer.should_stop = True

    trainer = quiet(tmp_path / "a", max_epochs=-1, callbacks=Stop())
    trainer.fit(Line(), loader(8))
    assert (trainer.current_epoch, trainer.max_epochs, trainer.state.stop_reason) == (
        5,
        -1,
        "trainer.should_stop was set",
    )
    limited = quiet(tmp_path / "b", max_epochs=-1, max_steps=7)
    limited.fit(Line(), loader(8))
    assert limited.global_step == 7
    with pytest.raises(
        ConfigError, match=r"or trainer\.max_epochs=-1 to train until a stop is requested"
    ):
        quiet(tmp_path / "c", max_epochs=None, max_steps=-1).fit(Line(), loader(8))


def test_a_clip_of_zero_is_off(tmp_path: Path) -> None:
    """gradient_clip_val=0 trains like no clipping."""
    off, none = Line(), Line()
    quiet(tmp_path / "off", gradient_clip_val=0).fit(off, loader(8))
    quiet(tmp_path / "none").fit(none, loader(8))
    assert torch.equal(weights(off), weights(none))


@pytest.mark.parametrize(("steps", "batches"), [(-1, 6), (None, 2), (1, 1)])
def test_the_sanity_check_takes_all_batches(
    steps: int | None, batches: int, tmp_path: Path
) -> None:
    """num_sanity_val_steps=-1 tries all validation batches, null the default of 2."""
    seen: list[bool] = []

    class Look(Callback):
        def on_validation_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
            seen.append(trainer.sanity_checking)

    quiet(tmp_path, num_sanity_val_steps=steps, callbacks=Look()).fit(Line(), loader(8), loader(23))
    assert sum(seen) == batches


def test_warnings_in_place_of_errors_for_determinism(tmp_path: Path) -> None:
    """deterministic="warn" sets torch's warn_only during the fit, and restores it."""
    seen: list[tuple[bool, bool]] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            seen.append(
                (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                )
            )

    quiet(tmp_path, deterministic="warn", callbacks=Look()).fit(Line(), loader(8))
    assert seen == [(True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_logger_none_is_the_default_one(tmp_path: Path) -> None:
    """logger=None gives the default loggers, as in Lightning; false gives none;
    both can be asked for before a run.
    """
    trainer = quiet(tmp_path, logger=None)
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger, TensorBoardLogger]
    assert trainer.logger is trainer.loggers[0]
    assert (quiet(tmp_path, logger=False).logger, quiet(tmp_path, logger=False).loggers) == (
        None,
        [],
    )


def test_the_parts_of_a_run_have_lightnings_names(tmp_path: Path) -> None:
    """trainer.model, .optimizers, .datamodule and .logger,
    task.logger and task.loggers are those of the run.
    """
    found: list[Any] = []

    class Own(Line):
        def on_train_start(self) -> None:
            found.extend(
                [self.logger, self.loggers, self.trainer.model, self.trainer.optimizers[0]]
            )

    task, csv = Own(), CSVLogger()
    trainer = quiet(tmp_path, logger=csv)
    trainer.fit(model=task, train_dataloaders=loader(8))
    assert (trainer.model, trainer.logger, trainer.datamodule) == (task, csv, None)
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    assert found == [csv, [csv], task, trainer.optimizers[0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda t: t.fit(),
            (
                r"^Trainer\.fit: missing a required argument: 'task'\. Its arguments: task,"
                r" train_dataloaders"
            ),
        ),
        (
            lambda t: t.fit(Line(), train_dataloader=1),
            r"^Trainer\.fit: train_dataloader is not a .*mean 'train_dataloaders'\?",
        ),
        (
            lambda t: t.fit(Line(), model=Line()),
            r"^Trainer\.fit: (multiple values for argument 'task'|model is not a setting)",
        ),
        (
            lambda t: t.fit(Line(), None, None, None, None, None, True, 8),
            r"^Trainer\.fit: too many positional arguments",
        ),
        (lambda t: t.test(modell=Line()), r"^Trainer\.test: modell is not a setting\."),
        (
            lambda t: t.fit(Line(), datamodule=loader(8)),
            r"^datamodule is a DataLoader; it must be a trainkit\.DataModule",
        ),
        (
            lambda t: Trainer(3),
            (
                r"^trainer: too many positional arguments\. Its arguments: engine, communication,"
                r" max_epochs"
            ),
        ),
        (lambda t: EarlyStopping(), r"^EarlyStopping: missing a required argument: 'monitor'"),
    ],
)
def test_wrong_arguments_of_a_call_raise_a_config_error(
    call: Any, words: str, tmp_path: Path
) -> None:
    """A public call with unknown, missing or too many arguments is
    answered with the names that there are.
    """
    with pytest.raises(ConfigError, match=words):
        call(quiet(tmp_path))


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_each_entry_point_takes_model(entry: str, tmp_path: Path) -> None:
    """Lightning's `model=` is the task."""
    assert getattr(quiet(tmp_path), entry)(
        model=Line(), dataloaders=[torch.ones(2, 3)] if entry == "predict" else loader(8)
    )


class Worse(Line):
    """A Line with a validation that gets worse each time."""

    def __init__(self) -> None:
        super().__init__()
        self.validations = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log a rising number."""
        self.validations += 1
        self.log("val/loss", float(self.validations))


@pytest.mark.parametrize(
    ("least", "epochs", "steps"),
    [({}, 2, 4), ({"min_epochs": 4}, 4, 8), ({"min_steps": 5}, 3, 5), ({"min_epochs": 1}, 2, 4)],
)
def test_early_stopping_waits_for_the_minimum(
    least: dict[str, int], epochs: int, steps: int, tmp_path: Path
) -> None:
    """A requested stop ends training at min_epochs and min_steps at the earliest;
    max_epochs still limits it.
    """
    stop = EarlyStopping("val/loss", patience=1)
    settings: dict[str, Any] = {"num_sanity_val_steps": 0, "callbacks": stop, **least}
    trainer = quiet(tmp_path / "a", max_epochs=9, **settings)
    trainer.fit(Worse(), loader(8), loader(4))
    assert trainer.global_step == steps
    assert trainer.state.current_epoch == (epochs if steps % 2 == 0 else epochs - 1)


def test_a_limit_of_time_does_not_wait_for_the_minimum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """min_epochs delays requests, and says so once; max_time ends the run."""

    class Stop(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            trainer.request_stop("enough", at_once=trainer.global_step == 3)

    trainer = quiet(tmp_path, max_epochs=9, min_epochs=5, callbacks=Stop())
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == 3
    said = "A stop is requested (enough); training continues until trainer.min_epochs=5."
    assert capsys.readouterr().out.count(said) == 1


class Data(DataModule):
    """A DataModule as templates write it."""

    def __init__(self, batch_size: int = 4, root: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def train_dataloader(self) -> Any:
        """Return 8 rows; look at the trainer."""
        assert self.trainer.world_size == 1
        return loader(8, batch_size=self.hparams.batch_size)


def test_a_datamodule_saves_its_arguments_and_sees_the_trainer(tmp_path: Path) -> None:
    """save_hyperparameters, hparams and trainer are those of a Task."""
    data, trainer = Data(batch_size=2), quiet(tmp_path)
    trainer.fit(Line(), datamodule=data)
    assert dict(data.hparams) == {"batch_size": 2, "root": "x"}
    assert trainer.global_step == 4
    assert trainer.datamodule is data
    assert data.trainer.model is trainer.model


def test_a_setting_is_not_changed_after_its_start(tmp_path: Path) -> None:
    """Lightning takes `trainer.limit_val_batches = 0` between two fits and in hooks; here nothing
    would read it. `callbacks` is a list that the next fit reads.
    """
    shown = {"engine", "precision", "profiler", "run_dir"}  # properties, and an object of a run
    settings = inspect.signature(Trainer.__init__).parameters.keys() - {"self", "callbacks", *shown}
    others = {"communication", "float32_matmul_precision"}  # which Lightning's Trainer lacks

    def refuse(trainer: Any) -> None:
        for name in settings - others:
            with pytest.raises(ConfigError, match=rf"trainer\.{name} = 3 .*Trainer\({name}="):
                setattr(trainer, name, 3)

    class InAHook(Line):
        def on_train_start(self) -> None:
            refuse(self.trainer)
            self.trainer.phase = "first"

    trainer = quiet(tmp_path)
    refuse(trainer)
    trainer.fit(InAHook(), loader())
    assert trainer.run.phase == "first"


@pytest.mark.parametrize("hook", ["setup", "on_train_start"])
def test_a_hook_that_asks_for_what_a_trainer_lacks_hears_what_to_use(
    hook: str, tmp_path: Path
) -> None:
    """Also of a name that nothing is known of; steps pay nothing for it (no __getattr__ of a Run)."""

    def ask(self: Line, *stage: str) -> None:
        assert not hasattr(self.trainer, "scaler")
        self.trainer.scaler  # noqa: B018

    asking = type("Asking", (Line,), {hook: ask})
    with pytest.raises(
        AttributeError, match=r"^'Trainer' .* 'scaler'\. In its place: trainer\.prec"
    ):
        quiet(tmp_path / "known").fit(asking(), loader())
    unknown = type("Unknown", (Line,), {"on_train_start": lambda self: self.trainer.skaler})
    with pytest.raises(AttributeError, match="^'Trainer' object has no attribute 'skaler'$"):
        quiet(tmp_path / "unknown").fit(unknown(), loader())
    assert not hasattr(Run, "__getattr__")
