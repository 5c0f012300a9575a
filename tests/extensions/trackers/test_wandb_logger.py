"""Weights & Biases, offline."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import loggers as lightning

from tests.helpers import wandb_file
from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.loggers import WandbLogger


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B writes only files, all of them in the test's folder."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "own"))


@pytest.mark.usefixtures("offline")
def test_offline_files_hold_the_run(tmp_path: Path) -> None:
    """With WANDB_MODE=offline a run leaves its own file:
    names, settings, each step's values, and how it ended.
    """
    task = Line()
    task.hparams |= {"width": 7654, "net": {"act": "relu"}}
    logger = WandbLogger(project="toys", tags=["tiny"], group="small")
    quiet(tmp_path / "mine", logger=logger, log_every_n_steps=1).fit(task, loader(8), loader(4))
    run, *_ = wandb_file.of_kind(tmp_path / "mine", "run")
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == (
        "toys",
        "mine",
        "small",
        ["tiny"],
    )
    assert run.run_id == logger.state_dict()["id"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["width"], config["net"]) == (7654, {"act": "relu"})
    rows = wandb_file.history(tmp_path / "mine")
    assert [(row["_step"], row["step"], row["epoch"], row["lr"]) for row in rows] == [
        (1, 1, 0, 0.1),
        (2, 2, 0, 0.1),
    ]
    assert "val/loss" in rows[1]
    assert rows[0]["train/loss"] == pytest.approx(8.8514, abs=1e-3)
    (end,) = wandb_file.of_kind(tmp_path / "mine", "exit")
    assert end.exit_code == 0


@pytest.mark.usefixtures("offline")
def test_secrets_in_labels_are_masked(tmp_path: Path) -> None:
    """A value that the config took from the environment is in no tag, group or name."""
    trainer = quiet(
        tmp_path,
        logger=WandbLogger(name="n S3CRET-env", tags=["t S3CRET-env"], group="S3CRET-env"),
        max_steps=1,
    )
    trainer.options = replace(trainer.options, masked_values=("S3CRET-env",))
    trainer.fit(Line(), loader(8))
    run, *_ = wandb_file.of_kind(tmp_path, "run")
    assert (run.display_name, list(run.tags), run.run_group) == ("n ***", ["t ***"], "***")


@pytest.mark.usefixtures("offline")
def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    """The second part uses the id stored in the checkpoint."""
    for epochs, options in ((1, {}), (2, {"ckpt_path": "last"})):
        logger = WandbLogger()
        trainer = quiet(
            tmp_path,
            logger=logger,
            max_epochs=epochs,
            log_every_n_steps=1,
            callbacks=ModelCheckpoint(),
        )
        trainer.fit(Line(), loader(8), loader(4), **options)
    files = sorted(
        path.name.split("-")[-1] for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    )
    assert len(set(files)) == 1
    assert files[0] == f"{logger.state_dict()['id']}.wandb"


@pytest.mark.parametrize(("log_model", "expected"), [(True, [2, 4]), ("all", [2, 4]), (False, [])])
@pytest.mark.usefixtures("offline")
def test_checkpoints_are_artifacts_on_request(
    tmp_path: Path, log_model: Any, expected: list[int]
) -> None:
    """With their files and aliases: those that are there at the end, or each as it is written."""
    logger, keep = WandbLogger(log_model=log_model), ModelCheckpoint(save_top_k=-1)

    class Waits(Line):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                self.trainer.checkpoints.wait()

    task = Waits()
    quiet(tmp_path, logger=logger, max_epochs=2, log_every_n_steps=1, callbacks=keep).fit(
        task, loader(8), loader(4)
    )
    artifacts = wandb_file.of_kind(tmp_path, "artifact")
    names = [json.loads(item.metadata)["checkpoint"] for item in artifacts]
    # one that was there before the links led to it is sent again, with its aliases
    assert list(dict.fromkeys(names)) == [f"epoch={step // 2 - 1}-step={step}" for step in expected]
    for item in artifacts:
        assert (item.name, item.type) == (f"model-{logger.state_dict()['id']}", "model")
        files = {content.path for content in item.manifest.contents}
        assert files == {"manifest.json", "training.pt", "weights.safetensors"}
    if artifacts:
        assert {"best", "last"} <= set(artifacts[-1].aliases)


class Fake:
    """Replaces the module wandb: records its calls.

    Attributes:
        summary: what a resumed run finds of its earlier start.
    """

    step = 0

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.summary: dict[str, Any] = {}

    def init(self, **options: Any) -> Any:
        """Start a run."""
        self.calls.append(options)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Take numbers."""
        self.calls.append((step, sorted(metrics)))

    def define_metric(self, name: str, **options: Any) -> None:
        """Take an axis."""

    def watch(self, model: Any, **options: Any) -> None:
        """Watch a model."""
        self.calls.append(("watch", model, options))

    def unwatch(self) -> None:
        """Watch none."""

    def finish(self, exit_code: int) -> None:
        """End."""
        self.calls.append(exit_code)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_named_logged_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The run is named like its folder unless it has a name, and a failed one is marked."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    class Fails(Line):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise KeyError("broken")

    trainer = quiet(tmp_path / "mine", logger=WandbLogger(group="g"), log_every_n_steps=1)
    try:
        trainer.fit(Fails(), loader(8))
    except KeyError:
        assert fails
    options, *logged, exit_code = fake.calls
    assert (options["project"], options["name"], options["group"], options["dir"]) == (
        "trainkit",
        "mine",
        "g",
        str(tmp_path / "mine"),
    )
    assert logged == [
        (step, ["_timestamp", "epoch", "lr", "step", "train/loss", "trainer/global_step"])
        for step in (1, 2)
    ]
    assert exit_code == int(fails)


def test_without_wandb_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without wandb, the message names the extra."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"WandbLogger needs wandb .*pip install 'trainkit\[wandb\]'"
    ):
        quiet(tmp_path, logger=WandbLogger()).fit(Line(), loader(8))


@pytest.mark.parametrize(
    ("given", "legal"),
    [
        (
            {"mode": "off"},
            r"logger\.wandb\.mode is 'off'; it must be one of 'online', 'offline', 'disabled'",
        ),
        (
            {"log_model": "best"},
            r"logger\.wandb\.log_model is 'best'; it must be true or false or 'all'",
        ),
        ({"finish_timeout_s": 0}, r"logger\.wandb\.finish_timeout_s is 0; it must be"),
    ],
)
def test_illegal_values_are_refused(given: dict[str, Any], legal: str) -> None:
    """The message has the key, the value and what is legal."""
    with pytest.raises(ConfigError, match=legal):
        WandbLogger(**given)


def start(fake: Fake, folder: Path, epochs: int, **options: Any) -> tuple[Any, Any]:
    """Train some epochs; return the id and `resume` passed to W&B."""
    fake.calls.clear()
    trainer = quiet(folder, logger=WandbLogger(), max_epochs=epochs, callbacks=ModelCheckpoint())
    trainer.fit(Line(), loader(8), loader(4), **options)
    return fake.calls[0]["id"], fake.calls[0]["resume"]


def test_a_resumed_run_is_the_same_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its own checkpoint; a run that starts from another run's checkpoint is a new run."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    first, resumes = start(fake, tmp_path / "a", 1)
    assert resumes is None
    assert start(fake, tmp_path / "a", 2, ckpt_path="last") == (first, "allow")
    other, resumes = start(
        fake, tmp_path / "b", 3, ckpt_path=str(tmp_path / "a" / "checkpoints" / "last")
    )
    assert other != first
    assert resumes is None


def test_repeated_steps_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed after its checkpoint repeats steps that W&B has."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start(fake, tmp_path, 1)
    fake.summary["trainer/global_step"] = 3
    trainer = quiet(tmp_path, logger=WandbLogger(), max_epochs=3, log_every_n_steps=1)
    fake.calls.clear()
    trainer.fit(Line(), loader(8), loader(4), ckpt_path="last")
    assert {step for step, _ in fake.calls[1:-1]} == {4, 5, 6}


def test_another_fit_logs_the_steps_that_an_earlier_one_has_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are left out of a resumed run alone: not of its test, nor of the next fit."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start(fake, tmp_path, 1)
    fake.summary["step"] = 6
    logger = WandbLogger()
    trainer = quiet(tmp_path, logger=logger, max_epochs=3, log_every_n_steps=1)
    trainer.fit(Line(), loader(8), loader(4), ckpt_path="last")
    fake.calls.clear()

    class Tests(Line):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", 1.0)

    trainer.test(Tests(), loader(4))
    assert any("test/loss" in call[1] for call in fake.calls if isinstance(call, tuple))
    fake.calls.clear()
    again = quiet(tmp_path / "other", logger=logger, max_epochs=1, log_every_n_steps=1)
    again.fit(Line(), loader(8), loader(4))
    assert {step for step, _ in fake.calls[1:-1]} == {1, 2}


class OwnAxis(Line):
    """Logs "step" in validation: far ahead of the run's, or behind it."""

    axis = 100.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("step", self.axis)


def test_an_axis_of_the_users_own_repeats_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a resumed run leaves out is counted in the run's steps."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start(fake, tmp_path, 1)
    fake.summary |= {"trainer/global_step": 100, "step": 3}
    trainer = quiet(tmp_path, logger=WandbLogger(), max_epochs=3, log_every_n_steps=1)
    fake.calls.clear()
    task = OwnAxis()
    task.axis = 1.0
    trainer.fit(task, loader(8), loader(4), ckpt_path="last")
    assert len([names for _, names in fake.calls[1:-1] if "train/loss" in names]) == 3
    assert len([names for _, names in fake.calls[1:-1] if "val/loss" in names]) == 2


def test_project_and_name_are_those_of_wandbs_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they are given; the name and the folder come first, as in Lightning."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "of-the-shell")
    monkeypatch.setenv("WANDB_NAME", "named")
    for logger in (WandbLogger(), WandbLogger("mine", str(tmp_path / "logs"), project="given")):
        quiet(tmp_path / logger.project, logger=logger, max_steps=1).fit(Line(), loader(8))
    first, second = [call for call in fake.calls if isinstance(call, dict)]
    assert (first["project"], first["name"]) == ("of-the-shell", "named")
    assert (second["project"], second["name"]) == ("given", "mine")
    assert second["dir"] == str(tmp_path / "logs")


class Watched(Line):
    """Logs to W&B itself, in each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.trainer.logger is not None
        for number in range(3):
            self.trainer.logger.experiment.log({"mine": number})


@pytest.mark.usefixtures("offline")
def test_what_the_user_logs_there_costs_no_value(tmp_path: Path) -> None:
    """Each call moves W&B's own count of steps on: a value of an earlier one would be dropped. The
    axis has the run's steps. `watch` before a fit begins with it.
    """
    logger, task = WandbLogger(), Watched()
    logger.watch(task, log="all", log_freq=1)
    trainer = quiet(tmp_path, logger=logger, max_epochs=2, log_every_n_steps=1)
    trainer.fit(task, loader(8), loader(4))
    rows = wandb_file.history(tmp_path)
    assert [row["trainer/global_step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert len([row for row in rows if "val/loss" in row]) == 2
    assert len([row for row in rows if "mine" in row]) == 12
    assert any(name.startswith("gradients/") for row in rows for name in row)
    assert any(name.startswith("parameters/") for row in rows for name in row)


@pytest.mark.usefixtures("offline")
def test_a_model_is_watched_in_each_fit_and_not_after_it(tmp_path: Path) -> None:
    """W&B's hooks log to its run, and fail where there is none."""
    logger, task = WandbLogger(), Watched()
    logger.watch(task, log="all", log_freq=1)
    for folder in (tmp_path / "a", tmp_path / "b"):
        trainer = quiet(folder, logger=logger, log_every_n_steps=1)
        trainer.fit(task, loader(8), loader(4))
        assert any(
            name.startswith("parameters/") for row in wandb_file.history(folder) for name in row
        )
        task(torch.zeros(2, 3))


@pytest.mark.parametrize("is_before", [True, False])
def test_watching_weights_that_are_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    """W&B's hooks would run collectives on rank 0 alone, which hangs."""
    monkeypatch.setattr("trainkit.extensions.trackers.wandb.is_spread", lambda _: True)
    monkeypatch.setitem(sys.modules, "wandb", Fake())
    logger = WandbLogger()

    class Watches(Line):
        def on_train_start(self) -> None:
            logger.watch(self)

    if is_before:
        monkeypatch.delattr(Watches, "on_train_start")
    task = Watches()
    if is_before:
        logger._watched.append((task, {}))  # whole before the fit
    with pytest.raises(ConfigError, match=r"WandbLogger\.watch: .* Watch a model on engine=ddp"):
        quiet(tmp_path, logger=logger, max_steps=1).fit(task, loader(8))


class Pictured(Line):
    """Logs by the names that Lightning's WandbLogger has."""

    def on_train_epoch_end(self) -> None:
        logger = self.trainer.logger
        assert isinstance(logger, WandbLogger)
        pictures = [torch.zeros(3, 4, 4), torch.ones(3, 4, 4)]
        logger.log_image(key="pictures", images=pictures, caption=["first", "second"])
        logger.log_table("table", columns=["x"], data=[[1], [2]], step=7)
        logger.log_text("text", ["said"], [["yes"]])


@pytest.mark.usefixtures("offline")
def test_pictures_and_tables_by_lightnings_names(tmp_path: Path) -> None:
    """They have the run's step, or that which is given; `version` is W&B's id, `name` the project,
    `save_dir` the folder of wandb/.
    """
    logger = WandbLogger("of the run", project="ours")
    assert logger.version is None
    assert logger.name == "ours"
    quiet(tmp_path, logger=logger, max_epochs=1).fit(Pictured(), loader(8))
    rows = wandb_file.history(tmp_path)
    axis = "trainer/global_step"
    [pictures] = [row for row in rows if "pictures.count" in row]
    assert (pictures[axis], pictures["pictures.captions"]) == (2, ["first", "second"])
    assert [row[axis] for row in rows if row.get("table.nrows") == 2] == [7]
    assert [row[axis] for row in rows if row.get("text.nrows") == 1] == [2]
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    assert run.name.endswith(f"-{logger.version}")
    assert Path(str(logger.save_dir)) == tmp_path
    assert wandb_file.of_kind(tmp_path, "run")[0].display_name == "of the run"


def test_watch_has_lightnings_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own log a histogram every 1000 batches, and no graph."""
    signature = inspect.signature(lightning.WandbLogger.watch).parameters
    own = inspect.signature(WandbLogger.watch).parameters
    assert [(p.name, p.default) for p in own.values()] == [
        (p.name, p.default) for p in signature.values()
    ]
    monkeypatch.setitem(sys.modules, "wandb", fake := Fake())
    logger, task = WandbLogger(), Line()
    logger.watch(task, "all")
    quiet(tmp_path, logger=logger, max_steps=1).fit(task, loader(8))
    assert ("watch", task, {"log": "all", "log_freq": 100, "log_graph": True}) in fake.calls


def test_sounds_and_videos_are_made_each_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `Audio` and `Video` of wandb take them."""

    class Sounding(Line):
        def on_train_epoch_end(self) -> None:
            logger: Any = self.trainer.logger
            logger.log_audio("sounds", ["a.wav", "b.wav"], sample_rate=[8000, 9000], step=5)
            logger.log_video("clips", ["c.mp4"])
            logger.log_audio("one", "d.wav", 7000, step=6)
            logger.log_image("picture", "e.png", masks=[{}])
            made.append(logger.use_artifact("team/data:v3", "dataset"))

    made: list[Any] = []
    rows: list[dict[str, Any]] = []
    fake: Any = Fake()
    fake.log = lambda values, step: rows.append(values)
    fake.use_artifact = lambda name, **options: (name, *options.values())
    fake.Audio = fake.Video = fake.Image = lambda item, **options: (item, options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    quiet(tmp_path, logger=WandbLogger(), max_epochs=1).fit(Sounding(), loader(8))
    assert {"trainer/global_step": 2, "clips": [("c.mp4", {})]} in rows
    assert {"trainer/global_step": 6, "one": [("d.wav", {"sample_rate": 7000})]} in rows
    assert {"trainer/global_step": 2, "picture": [("e.png", {"masks": {}})]} in rows
    sounds = [("a.wav", {"sample_rate": 8000}), ("b.wav", {"sample_rate": 9000})]
    assert {"trainer/global_step": 5, "sounds": sounds} in rows
    assert made == [("team/data:v3", "dataset")]


@pytest.mark.parametrize("is_open", [False, True])
def test_an_artifact_is_downloaded(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    """By the run that is open, which records it; else by W&B's own client."""

    class Stored:
        def __init__(self, *asked: Any, **options: Any) -> None:
            self.asked = (*asked, *options.values())

        def download(self, root: str | None) -> str:
            return f"{self.asked} in {root}"

    wandb = SimpleNamespace(
        run=SimpleNamespace(use_artifact=Stored) if is_open else None,
        Api=lambda: SimpleNamespace(artifact=Stored),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = WandbLogger.download_artifact("team/data:v3", Path("here"), "dataset")
    asked = ("team/data:v3",) if is_open else ("team/data:v3", "dataset")
    assert folder == f"{asked} in here"
    assert not WandbLogger.download_artifact("team/data:v3", use_artifact=False).endswith("here")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"images": torch.ones(3, 4, 4)}, r"has a Tensor for its list of images: write \[x\]"),
        ({"images": [1, 2], "caption": ["one"]}, r"has 2 images, and caption is \['one'\]"),
        ({"images": [1], "caption": "one"}, r"has 1 images, and caption is 'one'"),
        ({"images": [1]}, "this logger is open in fit, validate and test alone"),
    ],
)
def test_pictures_that_cannot_be_logged(given: dict[str, Any], error: str) -> None:
    """An error says what is wrong; on rank 0 also that the logger is not open."""
    """An error says what is wrong; on rank 0 also that the logger is not open."""
    with pytest.raises(ConfigError, match=error):
        WandbLogger().log_image("pictures", **given)


@pytest.mark.usefixtures("offline")
def test_each_step_has_a_row_of_its_own(tmp_path: Path) -> None:
    """Though W&B's own count is ahead, by what the user has logged there before the first step, or
    by an axis of the user's own: later steps took the place of earlier ones in one row.
    """

    class Early(OwnAxis):
        def on_fit_start(self) -> None:
            assert self.trainer.logger is not None
            for number in range(10):
                self.trainer.logger.experiment.log({"mine": number})

    trainer = quiet(tmp_path, logger=WandbLogger(), max_epochs=2, log_every_n_steps=1)
    trainer.fit(Early(), loader(8), loader(4))
    rows = wandb_file.history(tmp_path)
    axis = "trainer/global_step"
    assert [row[axis] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [(row[axis], row["step"]) for row in rows if "val/loss" in row] == [(100, 2), (100, 4)]
    assert len([row for row in rows if "mine" in row]) == 10


def test_the_name_that_a_sweep_gives_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's agent names the run of each trial by WANDB_RUN_ID."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_RUN_ID", "trial7")
    assert start(fake, tmp_path, 1)[0] == "trial7"


ALONE = """
import sys
from tests.helpers.toy import Line, loader, quiet
from trainkit.loggers import CSVLogger, WandbLogger
logger = [WandbLogger(mode="online", finish_timeout_s=0.5), CSVLogger()]
quiet(sys.argv[1], logger=logger, log_every_n_steps=1).fit(Line(), loader(8), loader(4))
print("trained", flush=True)
"""


def test_a_server_out_of_reach_stops_nothing(tmp_path: Path) -> None:
    """Training ends as usual, within the time limit; lost data is reported.
    W&B reads its address once per process.
    """
    pytest.importorskip("wandb", reason="wandb is not installed")
    with socket.socket() as closed:  # bound, and does not listen: a connection is refused
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        own = {
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": 40 * "0",
            "WANDB_INIT_TIMEOUT": "1",
            "WANDB_SILENT": "true",
        }
        command = [sys.executable, "-c", ALONE, str(tmp_path)]
        pipe, root = subprocess.PIPE, Path(__file__).parents[3]
        with subprocess.Popen(
            command, env=os.environ | own, stdout=pipe, text=True, cwd=root
        ) as process:
            assert process.stdout is not None
            calls = list(itertools.takewhile(lambda line: line != "trained\n", process.stdout))
            process.kill()  # W&B's own exit would wait a little longer
    assert any(
        line.startswith(
            ("WandbLogger did not finish within 0.5 s", "WandbLogger failed while opening")
        )
        for line in calls
    )
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4
