"""TensorBoard: its own reader finds the logged data in the files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import backend_context, metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.summary.writer import event_file_writer

from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.loggers import TensorBoardLogger

START, END = metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG


def train(folder: Path, ckpt_path: str | None = None, **settings: Any) -> EventAccumulator:
    """Train epochs of two steps and return a reader of the files."""
    known: dict[str, Any] = {
        "logger": TensorBoardLogger(),
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
    }
    task = Line()
    task.hparams["width"] = 7
    quiet(folder, **(known | settings)).fit(task, loader(8), loader(4), ckpt_path=ckpt_path)
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return reader


def test_scalars_and_settings_are_written(tmp_path: Path) -> None:
    """Each value is a scalar at its step; the settings are a text."""
    logger = TensorBoardLogger()
    reader = train(tmp_path, max_epochs=2, logger=logger)
    assert logger.log_dir == str(tmp_path / "tensorboard")
    assert set(reader.Tags()["scalars"]) == {"train/loss", "lr", "val/loss"}
    assert [(e.step, e.value) for e in reader.Scalars("lr")] == [
        (step, pytest.approx(0.1)) for step in (1, 2, 3, 4)
    ]
    assert [e.step for e in reader.Scalars("val/loss")] == [2, 4]
    (text,) = reader.Tensors("config/text_summary")
    assert b'"width": 7' in text.tensor_proto.string_val[0]


def test_what_is_trained_again_is_shown_once(tmp_path: Path) -> None:
    """Resuming from an older checkpoint hides the events after it."""
    train(tmp_path, max_epochs=3, callbacks=ModelCheckpoint(save_top_k=-1))
    reader = train(
        tmp_path, max_epochs=2, ckpt_path=str(tmp_path / "checkpoints" / "epoch=0-step=2")
    )
    assert [e.step for e in reader.Scalars("lr")] == [1, 2, 3, 4]


def test_a_resumed_run_is_read_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads files in the order of their names,
    in which the counter of one second's files puts 10 before 9.
    """
    train(tmp_path / "warm", max_epochs=1)
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    time.sleep(1 - time.time() % 1)  # both begin in the same second
    train(tmp_path, max_epochs=1)
    reader = train(tmp_path, max_epochs=3, ckpt_path="last")
    assert [e.step for e in reader.Scalars("lr")] == [1, 2, 3, 4, 5, 6]


def test_a_failed_run_is_closed(tmp_path: Path) -> None:
    """Values logged before an error are on disk after it."""

    class Fails(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 1:
                raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        quiet(tmp_path, logger=TensorBoardLogger(), log_every_n_steps=1).fit(Fails(), loader(8))
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [e.step for e in reader.Scalars("lr")] == [1]


def hparams_of(folder: Path) -> tuple[Any, Any]:
    """Return the reading of TensorBoard's own HParams plugin for the runs below a folder:
    the experiment, and the tags.
    """
    multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(folder))
    context = backend_context.Context(
        base_plugin.TBContext(data_provider=provider, multiplexer=multiplexer)
    )
    asked = RequestContext()
    tags = context.hparams_metadata(asked, "")
    found = context.hparams_from_data_provider(asked, "", limit=100)
    return context.experiment_from_metadata(asked, "", True, tags, found), tags


def test_the_hparams_tab_has_the_settings_and_the_values(tmp_path: Path) -> None:
    """TensorBoard's plugin lists the flat settings and each scalar, in the run's own folder;
    the run has ended well.
    """
    task = Line()
    task.hparams |= {"width": 7, "net": {"act": "relu", "bias": True}}
    quiet(tmp_path, logger=TensorBoardLogger(), log_every_n_steps=1).fit(task, loader(8), loader(4))
    experiment, tags = hparams_of(tmp_path)
    assert {info.name for info in experiment.hparam_infos} == {"width", "net.act", "net.bias"}
    assert {info.name.tag for info in experiment.metric_infos} == {"train/loss", "lr", "val/loss"}
    assert list(tags) == ["tensorboard"]
    held = metadata.parse_session_start_info_plugin_data(tags["tensorboard"][START]).hparams
    assert (
        held["width"].number_value,
        held["net.act"].string_value,
        held["net.bias"].string_value,
    ) == (7, "relu", "true")
    end = metadata.parse_session_end_info_plugin_data(tags["tensorboard"][END])
    assert end.status == Status.Value("STATUS_SUCCESS")


def test_a_run_that_failed_has_no_end_for_the_hparams_tab(tmp_path: Path) -> None:
    """It may resume, and TensorBoard honours only the first end."""

    class Fails(Line):
        def on_train_epoch_end(self) -> None:
            raise KeyError("broken")

    task = Fails()
    task.hparams["width"] = 7
    with pytest.raises(KeyError, match="broken"):
        quiet(tmp_path, logger=TensorBoardLogger(), log_every_n_steps=1).fit(task, loader(8))
    _, tags = hparams_of(tmp_path)
    assert list(tags["tensorboard"]) == [START]


def test_without_hparams_there_are_none(tmp_path: Path) -> None:
    """The text of the config is still there."""
    reader = train(tmp_path, logger=TensorBoardLogger(hparams=False))
    assert reader.Tags()["tensors"] == ["config/text_summary"]
    assert hparams_of(tmp_path)[1] == {}


def test_histograms_hold_weights_and_gradients_of_the_step(tmp_path: Path) -> None:
    """At the requested steps: the weights after the update, and the gradients that made it."""
    seen: dict[str, float] = {}

    class Notes(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 2:
                seen["weight"] = float(self.model.weight.detach().sum())
                seen["grad"] = float(self.model.weight.grad.sum())

    logger = TensorBoardLogger(histograms_every_n_steps=2)
    quiet(tmp_path, logger=logger, max_steps=5).fit(Notes(), loader(23), loader(4))
    reader = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    reader.Reload()
    names = {f"{of}/model/{what}" for of in ("weights", "gradients") for what in ("weight", "bias")}
    assert set(reader.Tags()["histograms"]) == names
    for name in names:
        assert [event.step for event in reader.Histograms(name)] == [2, 4]
    assert reader.Histograms("weights/model/weight")[0].histogram_value.sum == pytest.approx(
        seen["weight"], rel=1e-5
    )
    assert reader.Histograms("gradients/model/weight")[0].histogram_value.sum == pytest.approx(
        seen["grad"], rel=1e-5
    )


def test_a_gradient_that_is_not_finite_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A histogram cannot hold NaN: the finite values are drawn,
    and the number of others is a scalar.
    """

    class Breaks(Line):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.model.weight.grad[0, 1] = float("nan")

    quiet(tmp_path, logger=TensorBoardLogger(histograms_every_n_steps=1), max_steps=1).fit(
        Breaks(), loader(8)
    )
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [event.value for event in reader.Scalars("nonfinite/gradients/model/weight")] == [1.0]
    assert reader.Histograms("gradients/model/weight")[0].histogram_value.num == 2
    assert "failed" not in capsys.readouterr().out


def test_the_graph_is_drawn_from_the_first_batch(tmp_path: Path) -> None:
    """Its nodes are the model's; training is the same to the last bit,
    dropout and batch norm included.
    """
    drawn, plain = Net(), Net()
    for folder, task, log_graph in (("a", drawn, True), ("b", plain, False)):
        torch.manual_seed(3)
        logger = TensorBoardLogger(log_graph=log_graph)
        quiet(tmp_path / folder, logger=logger, max_epochs=2, assert_no_sync=True).fit(
            task, loader(8), loader(4)
        )
    readers = [EventAccumulator(str(tmp_path / folder / "tensorboard")) for folder in "ab"]
    for reader in readers:
        reader.Reload()
    assert [reader.Tags()["graph"] for reader in readers] == [True, False]
    assert any("Linear" in node.name or "addmm" in node.op for node in readers[0].Graph().node)
    for name, value in drawn.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert drawn.model.training


@pytest.mark.parametrize("how", ["forward raises", "batch has no tensor"])
def test_a_model_that_cannot_be_drawn_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """It is no error: the picture is missing, scalars are not."""

    class Strange(Line):
        def forward(self, x: Any) -> Any:
            if not self.training and how == "forward raises":
                raise RuntimeError("not in this mode\nand pages more")
            return super().forward(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[1] if how != "forward raises" else batch, batch_idx)

    data = (
        [(f"batch {i}", batch) for i, batch in enumerate(loader(8))]
        if how != "forward raises"
        else loader(8)
    )
    logger = TensorBoardLogger(log_graph=True)
    quiet(tmp_path, logger=logger, log_every_n_steps=1, max_epochs=2).fit(Strange(), data)
    printed = capsys.readouterr().out
    why = (
        "RuntimeError: not in this mode"
        if how == "forward raises"
        else "TypeError: the batch starts with a str"
    )
    assert printed.count(f"TensorBoardLogger: no graph of Strange: {why}") == 1
    assert "pages more" not in printed
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("lr")] == [1, 2, 3, 4]


def test_steps_between_histograms_are_one_or_more() -> None:
    """An illegal number is refused with the legal range."""
    with pytest.raises(
        ConfigError, match=r"logger\.tensorboard\.histograms_every_n_steps is 0; it must be"
    ):
        TensorBoardLogger(histograms_every_n_steps=0)
