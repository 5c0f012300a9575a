"""MLflow, in a folder: its own client reads the logged data."""

from __future__ import annotations

import math
import shutil
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.places import make_store
from trainkit.errors import ConfigError, Preempted
from trainkit.loggers import CSVLogger, MLFlowLogger
from trainkit.loggers.base import RunFacts

mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove any server from the environment, and allow MLflow's folder store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


class Reported(Line):
    """Has settings, and logs a name and numbers that MLflow treats specially."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.hparams |= {"width": width, "net": {"act": "relu"}, "long": "x" * 10_000}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log them."""
        self.log("odd [name]/@1", math.nan if self.global_step else 2.5)
        return super().training_step(batch, batch_idx)


def train(
    folder: Path, task: Line | None = None, logger: MLFlowLogger | None = None, **settings: Any
) -> Any:
    """Train, and return MLflow's client of the run's folder and its one run."""
    ckpt_path = settings.pop("ckpt_path", None)
    known: dict[str, Any] = {"log_every_n_steps": 1, "num_sanity_val_steps": 0}
    trainer = quiet(folder, logger=logger or MLFlowLogger(), **known | settings)
    trainer.fit(task or Reported(), loader(8), loader(4), ckpt_path=ckpt_path)
    return read(folder)


def read(folder: Path) -> Any:
    """Return MLflow's client of a folder, and its only run."""
    client = mlflow.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    (run,) = [
        run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])
    ]
    return client, run


def test_the_folder_holds_the_run(tmp_path: Path) -> None:
    """Names, flat settings, each value with its step and time, and how it ended."""
    logger = MLFlowLogger(experiment_name="toys", tags={"who": "me"})
    seen = []

    class Asks(Reported):
        def on_fit_start(self) -> None:
            seen.append(logger.run_id)

    client, run = train(tmp_path / "mine", Asks(), logger=logger, max_epochs=2)
    assert seen == [logger.run_id]
    assert (logger.name, logger.version) == (run.info.experiment_id, run.info.run_id)
    assert (logger.save_dir, MLFlowLogger(tracking_uri="file:here").save_dir) == (None, "here")
    assert client.get_experiment(run.info.experiment_id).name == "toys"
    assert (run.info.run_name, run.info.status, run.info.run_id) == (
        "mine",
        "FINISHED",
        logger.run_id,
    )
    assert run.data.tags["who"] == "me"
    assert (run.data.params["width"], run.data.params["net.act"], len(run.data.params["long"])) == (
        "7",
        "relu",
        6000,
    )
    assert set(run.data.metrics) == {"train/loss", "lr", "val/loss", "epoch", "odd _name_/_1"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert history[0].value == pytest.approx(8.8514, abs=1e-3)
    assert all(metric.timestamp > 1.7e12 for metric in history)
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "val/loss")] == [
        2,
        4,
    ]
    odd = client.get_metric_history(run.info.run_id, "odd _name_/_1")
    assert odd[0].value == 2.5
    assert math.isnan(odd[1].value)


def test_secrets_in_tags_and_names_are_masked(tmp_path: Path) -> None:
    """As in the config: texts under secret keys,
    and values that the config took from the environment.
    """
    logger = MLFlowLogger(
        run_name="by S3CRET-env",
        tags={"api_token": "hf_123456", "url": "https://u:S3CRET-env@host"},
    )
    trainer = quiet(tmp_path, logger=logger, max_steps=1)
    trainer.options = replace(trainer.options, masked_values=("S3CRET-env",))
    trainer.fit(Line(), loader(8))
    _, run = read(tmp_path)
    assert (run.data.tags["api_token"], run.data.tags["url"]) == ("***", "https://u:***@host")
    assert run.info.run_name == "by ***"


def test_a_resumed_run_is_the_same_run_there(tmp_path: Path) -> None:
    """From its own checkpoint: changed settings become tags, since params are immutable."""
    _, first = train(tmp_path, callbacks=ModelCheckpoint())
    client, run = train(
        tmp_path, Reported(width=9), callbacks=ModelCheckpoint(), max_epochs=2, ckpt_path="last"
    )
    assert run.info.run_id == first.info.run_id
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "lr")] == [
        1,
        2,
        3,
        4,
    ]
    assert (run.data.params["width"], run.data.tags["changed.width"]) == ("7", "9")
    assert "changed.net.act" not in run.data.tags


def test_a_run_from_another_ones_checkpoint_is_a_new_run(tmp_path: Path) -> None:
    """It does not write into the other run."""
    place = (tmp_path / "all").as_uri()
    runs = set()
    for folder, options in (
        ("a", {}),
        ("b", {"ckpt_path": str(tmp_path / "a" / "checkpoints" / "last")}),
    ):
        logger = MLFlowLogger(tracking_uri=place)
        trainer = quiet(
            tmp_path / folder,
            logger=logger,
            max_epochs=1 + bool(options),
            callbacks=ModelCheckpoint(),
        )
        trainer.fit(Line(), loader(8), loader(4), **options)
        runs.add((logger.run_id, logger.state_dict()["key"]))
    assert len({run for run, _ in runs}) == 2
    assert len({key for _, key in runs}) == 2  # else the second one would resume either


@pytest.mark.parametrize(
    ("error", "status"), [(KeyError("broken"), "FAILED"), (Preempted("a signal"), "KILLED")]
)
def test_the_end_is_reported(tmp_path: Path, error: BaseException, status: str) -> None:
    """A failed run is FAILED, and a run ended by a signal is KILLED."""

    class Ends(Line):
        def on_train_epoch_end(self) -> None:
            raise error

    with pytest.raises(type(error)):
        train(tmp_path, Ends())
    assert read(tmp_path)[1].info.status == status


@pytest.mark.parametrize(
    ("log_model", "top", "steps"),
    [
        (True, -1, [2, 4, 6]),
        (True, 1, [6]),
        ("all", -1, [2, 4, 6]),
        ("all", 1, [2, 4, 6]),
        (False, -1, []),
    ],
)
def test_checkpoints_are_artifacts_on_request(
    tmp_path: Path, log_model: Any, top: int, steps: list[int]
) -> None:
    """Those that are there at the end, or each as it is written; tags name the best and the last."""

    class Waits(Reported):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                self.trainer.checkpoints.wait()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.loggers[0].settle()  # before the next checkpoint removes this one

    keep = ModelCheckpoint(save_top_k=top)
    client, run = train(
        tmp_path, Waits(), MLFlowLogger(log_model=log_model), callbacks=keep, max_epochs=3
    )
    names = [Path(item.path).name for item in client.list_artifacts(run.info.run_id, "checkpoints")]
    assert names == [f"epoch={step // 2 - 1}-step={step}" for step in steps]
    for name in names:
        files = {
            Path(item.path).name
            for item in client.list_artifacts(run.info.run_id, f"checkpoints/{name}")
        }
        assert files == {"manifest.json", "training.pt", "weights.safetensors"}
    found = (run.data.tags.get("checkpoint.last"), run.data.tags.get("checkpoint.best"))
    assert found == ((names[-1], names[-1]) if names else (None, None))


def test_a_checkpoint_that_cannot_be_uploaded_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported, and logging continues."""

    class Fails(MLFlowLogger):
        def upload(self, folder: Path, name: str, aliases: tuple[str, ...]) -> None:
            raise PermissionError("no space for you")

    _, run = train(tmp_path, Reported(), Fails(log_model="all"), callbacks=ModelCheckpoint())
    assert (
        "Fails did NOT upload the checkpoint epoch=0-step=2: PermissionError: no space for you"
        in capsys.readouterr().out
    )
    assert run.info.status == "FINISHED"


def test_a_checkpoint_that_is_removed_meanwhile_is_uploaded_whole(tmp_path: Path) -> None:
    """A fit does not wait for an upload before it removes a checkpoint that others have beaten."""
    uploaded, left = [], list[str]()

    class Late(MLFlowLogger):
        def upload(self, folder: Path, name: str, aliases: tuple[str, ...]) -> None:
            shutil.rmtree(tmp_path / "checkpoints" / name)
            uploaded.append({path.name for path in folder.iterdir()})
            left.append(folder.name)

    train(tmp_path, Reported(), Late(log_model=True), callbacks=ModelCheckpoint())
    assert uploaded == [{"manifest.json", "training.pt", "weights.safetensors"}]
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == []
    (tmp_path / "checkpoints" / left[0]).mkdir()  # as after a kill: the next start removes it
    make_store(tmp_path / "checkpoints").tidy()
    assert not (tmp_path / "checkpoints" / left[0]).exists()


def test_a_server_out_of_reach_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training ends as usual; the loss of data is reported once, by this logger only."""
    with socket.socket() as closed:  # bound, and does not listen: a connection is refused
        closed.bind(("127.0.0.1", 0))
        loggers = [
            MLFlowLogger(tracking_uri=f"http://127.0.0.1:{closed.getsockname()[1]}"),
            CSVLogger(),
        ]
        quiet(tmp_path, logger=loggers, log_every_n_steps=1).fit(Line(), loader(8), loader(4))
    assert capsys.readouterr().out.count("MLFlowLogger failed while opening: ") == 1
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4


def test_many_settings_are_sent_in_parts(tmp_path: Path) -> None:
    """MLflow accepts a hundred params at once."""
    task = Line()
    task.hparams |= {f"key{i}": i for i in range(250)}
    assert len(train(tmp_path, task)[1].data.params) == 250


def test_a_slow_server_gets_several_steps_at_once(tmp_path: Path) -> None:
    """Values logged while it did not answer are sent in one request."""
    sent: list[int] = []

    class Slow(MLFlowLogger):
        gate = threading.Event()

        def open(self, run: RunFacts) -> None:
            self.gate.wait(30)
            super().open(run)
            send = self._client.log_batch

            def count(run_id: str, metrics: Any = (), params: Any = ()) -> None:
                sent.append(len({metric.step for metric in metrics}))
                send(run_id, metrics=metrics, params=params)

            self._client.log_batch = count

    class Answers(Line):
        def on_train_end(self) -> None:
            Slow.gate.set()

    client, run = train(tmp_path, Answers(), Slow(), max_epochs=3)
    assert sent == [6]
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "lr")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_without_mlflow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without mlflow, the message names the extra before training starts."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        ConfigError, match=r"MLFlowLogger needs mlflow .*pip install 'trainkit\[mlflow\]'"
    ):
        quiet(tmp_path, logger=MLFlowLogger()).fit(Line(), loader(8))


def test_names_that_users_know_from_elsewhere_are_explained() -> None:
    """save_dir and run_id are Lightning's; the message names the alternative."""
    with pytest.raises(
        ConfigError, match="MLFlowLogger.save_dir is 'here', .*tracking_uri='file:FOLDER'"
    ):
        MLFlowLogger(save_dir="here")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"logger\.mlflow\.tags is 'a'; it must be"):
        MLFlowLogger(tags="a")  # type: ignore[arg-type]
