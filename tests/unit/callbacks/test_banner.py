"""Banner: the lines printed at the start of a fit."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.by_hand import Pair
from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.callbacks.banner import waits_for_copies
from trainkit.data.feed import MapFeed
from trainkit.engine.options import changed
from trainkit.errors import ConfigError
from trainkit.extensions.communication.settings import PowerSGD
from trainkit.extensions.plan.simulated import SimulatedEngine


def banner(
    tmp_path: Path,
    capsys: Any,
    task: Line | None = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> dict[str, str]:
    """Return the banner's rows of a fit."""
    trainer = quiet(tmp_path, enable_model_summary=True, enable_checkpointing=True, **settings)
    trainer.fit(task or Line(), loader(23), ckpt_path=ckpt_path)
    lines = capsys.readouterr().out.splitlines()
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines}


def test_the_banner_shows_the_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine, model, batch, rate, length and files have one line each."""
    rows = banner(tmp_path, capsys, max_epochs=2, accumulate_grad_batches=2)
    assert rows.pop("engine").startswith(
        "single, 1 rank, cpu with 1 thread a rank, precision 32-true"
    )
    assert rows == {
        "model": "Line, 4 parameters",
        "optimizer": "fused SGD",
        "global batch": "4 per rank x 1 rank x 2 accumulated = 8 samples",
        "learning rate": "0.1 x 1 rank = 0.1 (lr_scaling=linear)",
        "run": "2 epochs of 3 steps, 6 steps in all",
        "files": str(tmp_path),
    }


@pytest.mark.parametrize(("batch", "lines"), [(2, 1), (4, 0)])
def test_a_scaled_rate_is_shown_without_the_banner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: int, lines: int
) -> None:
    """Another framework would leave the rate as it is set; a rate that is left needs no line."""
    quiet(tmp_path, lr_reference_batch_size=batch).fit(Line(), loader(23))
    line = "learning rate  0.1 x 4 / 2 = 0.2 (lr_scaling=linear)"
    assert capsys.readouterr().out.splitlines() == [line] * lines


@pytest.mark.parametrize(
    ("kind", "is_pinned", "waits"),
    [("cuda", False, True), ("cuda", True, False), ("mps", False, False), ("cpu", False, False)],
)
def test_a_loader_that_is_not_pinned_is_mentioned(
    tmp_path: Path, kind: str, is_pinned: bool, waits: bool
) -> None:
    """On an accelerator that could copy its batches beside the computation."""
    trainer = quiet(tmp_path, max_steps=1)
    trainer.fit(Line(), loader(8))
    feed = trainer.train_feed
    assert isinstance(feed, MapFeed)
    feed.source.options["pin_memory"] = is_pinned
    on_device: Any = SimpleNamespace(
        engine=SimpleNamespace(device=torch.device(kind)), train_feed=feed
    )
    assert waits_for_copies(on_device) == waits


def test_one_is_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of 1 are singular: not "1 epochs of 1 steps"."""
    assert (
        banner(tmp_path, capsys, max_epochs=1, limit_train_batches=1)["run"]
        == "1 epoch of 1 step, 1 step in all"
    )


def test_the_banner_shows_where_a_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run names its checkpoint, epoch and step."""
    banner(tmp_path, capsys, max_steps=8)
    rows = banner(tmp_path, capsys, max_steps=9, ckpt_path="last")
    assert rows["resumed"] == f"{tmp_path}/checkpoints/epoch=1-step=8 at epoch 1, step 8"
    assert rows["run"] == "9 steps in all"


def test_frozen_parameters_are_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's line has trained and frozen parameters."""
    task = Line()
    task.model.bias.requires_grad_(False)
    assert banner(tmp_path, capsys, task)["model"] == "Line, 3 parameters and 1 frozen"


def test_rates_are_those_that_the_user_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The banner prints the user's rate, also if a schedule has changed it already."""

    class Warm(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)]

    rows = banner(tmp_path, capsys, Warm(), lr_reference_batch_size=2)
    assert rows["learning rate"] == "0.1 x 4 / 2 = 0.2 (lr_scaling=linear)"


def test_what_changes_the_sum_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine options that change the computed or sent values are on the first line."""
    engine = SimulatedEngine("ddp", 1, 1)
    engine.shown_options = changed(compression="fp16", op="sum", gradient_predivide_factor=1.0)
    assert banner(tmp_path / "named", capsys, engine=engine)["engine"].endswith(
        ", compression fp16, op sum"
    )
    assert banner(tmp_path, capsys)["engine"].endswith("precision 32-true")


@pytest.mark.parametrize(
    ("reference", "scaling", "advice"),
    [
        (2, "linear", "trainer.lr_scaling is linear and multiplies the rate of AdamW by 2: that"),
        (2, "sqrt", ""),
        (4, "linear", ""),
    ],
)
def test_the_rule_of_sgd_for_an_adaptive_optimizer_is_said(
    reference: int, scaling: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The linear rule is SGD's: where it raises AdamW's rate, the settings to choose are named."""

    class Adaptive(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    settings = {"max_epochs": 1, "lr_reference_batch_size": reference, "lr_scaling": scaling}
    rows = banner(tmp_path, capsys, Adaptive(), **settings)
    shown = rows.get("advice", "")
    assert shown.startswith(advice) and bool(shown) == bool(advice)
    assert not advice or shown.endswith("Use trainer.lr_scaling=sqrt or none.")


def test_a_warmup_longer_than_the_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The banner says how far the rate gets; nothing is said of a warm-up that ends in time."""
    said = banner(tmp_path / "long", capsys, max_steps=4, lr_warmup_steps=10)["warm-up"]
    assert said.startswith(
        "10 steps are longer than the run of 4 steps: warm-up ends at 0.04 and never reaches 0.1."
    )
    assert "warm-up" not in banner(tmp_path / "equal", capsys, max_steps=4, lr_warmup_steps=4)
    assert "warm-up" not in banner(tmp_path / "none", capsys, max_steps=4)


def test_a_run_without_a_limit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With max_epochs=-1 the number of epochs is open."""

    class Once(Line):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = True

    rows = banner(tmp_path, capsys, Once(), max_epochs=-1)
    assert rows["run"] == "epochs of 6 steps, without a limit on their number"


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        (
            {"max_epochs": 3, "max_steps": 8},
            "8 steps in all, before the end of 3 epochs of 6 steps",
        ),
        ({"max_epochs": 1, "max_steps": 8}, "1 epoch of 6 steps, 6 steps in all"),
        ({"max_steps": 8}, "8 steps in all"),
        ({"max_time": 0.001}, "epochs of 6 steps, until Timer ends the run"),
    ],
)
def test_the_limit_that_ends_a_run_is_said(
    limits: dict[str, Any], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two limits the one that comes first has the word."""
    assert banner(tmp_path, capsys, **({"max_epochs": None} | limits))["run"] == shown


class Scheduled(Line):
    """A line under a cosine, or one that is stepped by steps."""

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__()
        self.length, self.options = length, options

    def configure_optimizers(self) -> Any:
        """Return an optimizer and its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}


@pytest.mark.parametrize(
    ("length", "options", "said"),
    [
        (2, {}, "CosineAnnealingLR has T_max=2: after 2 epochs of 3 the rate rises again"),
        (3, {}, None),
        (
            17,
            {"interval": "step"},
            "CosineAnnealingLR has T_max=17: after 17 steps of 18 the rate rises again",
        ),
        (9, {"interval": "step", "frequency": 2}, None),
    ],
)
def test_a_cosine_that_is_shorter_than_the_run_is_said(
    length: int, options: Any, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a resume with more epochs, where T_max is a number of its own."""
    assert (
        banner(tmp_path, capsys, Scheduled(length, **options), max_epochs=3).get("schedule") == said
    )


@pytest.mark.parametrize("every", [12, 13])
def test_steps_that_a_run_does_not_reach_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    """Of the run itself, of checkpoints, and of exact steps before an approximation."""
    settings: dict[str, Any] = {
        "callbacks": ModelCheckpoint(every_n_train_steps=every),
        "communication": PowerSGD(start_after_steps=every - 1),
        "enable_model_summary": True,
    }
    quiet(tmp_path, max_epochs=2, max_steps=every, **settings).fit(Line(), loader())
    said = " ".join(capsys.readouterr().out.split())
    for name in (
        "max_steps",
        "ModelCheckpoint.every_n_train_steps",
        "communication.start_after_steps",
    ):
        assert (f"{name} is not reached: the run has 12 steps" in said) == (every == 13)


def test_steps_by_hand_are_not_counted_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch may make two, so that a limit beyond the batches is reached."""
    trainer = quiet(tmp_path, max_epochs=9, max_steps=10, enable_model_summary=True)
    trainer.fit(Pair(), loader(4))
    assert trainer.global_step == 10
    assert "is not reached" not in capsys.readouterr().out


def test_what_counts_steps_and_what_is_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Lightning counts batches, and where drop_last leaves out more than part of a batch."""
    rows = banner(
        tmp_path, capsys, Scheduled(17, interval="step"), max_epochs=3, accumulate_grad_batches=2
    )
    assert rows["counted"] == "schedulers by steps, each of 2 batches of a rank"
    trainer = quiet(
        tmp_path,
        enable_model_summary=True,
        max_epochs=1,
        accumulate_grad_batches=3,
        val_check_interval=1,
    )
    trainer.fit(Line(), loader(23, drop_last=True), loader(4))
    out = capsys.readouterr().out
    assert "; drop_last=True leaves out 11 of 23 samples of an epoch" in out
    assert "val_check_interval by steps, each of 3 batches of a rank" in out
    trainer.fit(Line(), loader(23))
    assert (
        "This Trainer has run a fit before; this one is a new run, from epoch 0 and step 0."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("every", "is_said"), [(2, False), (3, True)])
def test_a_run_that_ends_before_its_first_validation_says_so(
    every: int, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its validation data are for nothing."""
    trainer = quiet(
        tmp_path, enable_model_summary=True, max_epochs=2, check_val_every_n_epoch=every
    )
    trainer.fit(Line(), loader(8), loader(4))
    text = capsys.readouterr().out
    assert ("no validation, since check_val_every_n_epoch is 3" in text) == is_said


def test_a_monitored_value_of_no_validation_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first epoch, at whose end the run fails."""
    trainer = quiet(
        tmp_path, enable_model_summary=True, callbacks=EarlyStopping("val/loss"), max_epochs=1
    )
    with pytest.raises(ConfigError, match=r"EarlyStopping\.monitor is 'val/loss'"):
        trainer.fit(Line(), loader(8))
    words = "EarlyStopping monitors val/loss, and there is no validation data"
    assert words in capsys.readouterr().out
    trainer.fit(Line(), loader(8), loader(4))
    assert words not in capsys.readouterr().out


def test_lines_fit_the_launchers_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a long line breaks between words, below its text and not below its name."""
    monkeypatch.setattr("trainkit.callbacks.banner.columns_of_launcher", lambda: 50)
    quiet(tmp_path, enable_model_summary=True).fit(Line(), loader(23))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    at = next(i for i, line in enumerate(lines) if line.startswith("engine"))
    assert re.match(r" {15}\w", lines[at + 1])


def test_modules_in_eval_mode_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those that from_pretrained of transformers returns: a fit leaves them so, as Lightning does."""
    task = Net()
    task.model.eval()
    advice = banner(tmp_path, capsys, task)["advice"]
    assert advice.startswith("6 modules in eval mode, as before the fit: no dropout")
    quiet(tmp_path / "other", max_steps=1).fit(task, loader(8))
    assert f"advice         {advice}\n" in capsys.readouterr().out
