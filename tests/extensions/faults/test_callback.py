"""FaultInjection: its settings are checked, and each fault happens once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.toy import Line, loader
from trainkit.callbacks import FaultInjection, ModelCheckpoint
from trainkit.errors import ConfigError, TrainkitError
from trainkit.extensions.elastic.attempts import killed_loader
from trainkit.extensions.faults.callback import DEEDS, flipped
from trainkit.trainer import Trainer


def fit(tmp_path: Path, *faults: dict[str, Any], **settings: Any) -> Line:
    """Fit two epochs of six steps, with faults."""
    task = Line()
    trainer = Trainer(
        max_epochs=2,
        run_dir=str(tmp_path / "run"),
        callbacks=[
            FaultInjection(list(faults)),
            ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(task, loader(), loader(), ckpt_path="auto")
    return task


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"do": "kil", "step": 3},
            r"faults\[0\].do is 'kil'; it must be one of kill, .* Did you mean 'kill'\?",
        ),
        ({"do": "kill"}, r"faults\[0\] lacks 'step'"),
        ({"do": "kill", "step": -1}, r"faults\[0\].step is -1; it must be 0 or more"),
        ({"do": "kill", "step": "3"}, r"faults\[0\].step is '3'; it must be a number"),
        ({"do": "kill", "step": True}, r"faults\[0\].step is True; it must be a number"),
        ({"do": "kill", "at": 3}, r"faults\[0\] has the key 'at'; use do, rank, step"),
        (
            {"do": "kill", "step": 3, "during": "commit"},
            r"during is 'commit'; it must be one of step, validation, saving, recovery",
        ),
        (
            {"do": "flip", "step": 3, "of": "weigth"},
            r"of is 'weigth'; it must be one of activation, gradient, weight",
        ),
        ({"do": "drop_host", "step": 3}, r"it needs .host. and .hosts_file., the file"),
        ("kill", r"faults is \['kill'\]; it must be a list of which each is a mapping"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: Any, message: str) -> None:
    """The message has the place, the value, and what is legal."""
    with pytest.raises(ConfigError, match=message):
        FaultInjection([fault])


def test_an_error_comes_once_in_a_run_however_often_it_is_started(tmp_path: Path) -> None:
    """The run resumed from the checkpoint passes the place of the failure."""
    fault = {"do": "raise", "step": 7}
    with pytest.raises(RuntimeError, match="FaultInjection raises this on rank 0 after step 7"):
        fit(tmp_path, fault)
    held = torch.cat([p.detach().flatten() for p in fit(tmp_path, fault).parameters()])
    whole = torch.cat([p.detach().flatten() for p in fit(tmp_path / "whole").parameters()])
    assert torch.equal(held, whole)


@pytest.mark.parametrize("during", ["validation", "saving", "recovery"])
def test_a_fault_comes_during_what_it_was_asked_for(tmp_path: Path, during: str) -> None:
    """A fault waits for the first validation, saving or recovery from the step on."""
    fault = {"do": "raise", "step": 3, "during": during}
    if during == "recovery":
        fit(tmp_path, fault)  # nothing is put back in it
    with pytest.raises(RuntimeError, match="FaultInjection raises this"):
        fit(tmp_path, fault)


# torch raises in its handler of SIGCHLD. If Python is in a __del__ then, the error is printed there,
# and the loader sees a moment later that its worker has ended.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_loader_worker_is_an_error(tmp_path: Path) -> None:
    """Of one process it ends the fit, in torch's words; without workers there is none to kill."""
    fault = {"do": "kill_loader", "step": 1}
    with pytest.raises(ConfigError, match="no loader worker at that step. Set data.num_workers"):
        fit(tmp_path / "a", fault)
    task = Line()
    trainer = Trainer(
        max_epochs=2,
        run_dir=str(tmp_path / "b"),
        callbacks=[FaultInjection([fault])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RuntimeError) as error:
        trainer.fit(task, DataLoader(loader().dataset, batch_size=4, num_workers=1))
    assert killed_loader(error.value) in ("is killed by signal: Killed", "exited unexpectedly")
    assert killed_loader(RuntimeError("Caught ValueError in DataLoader worker process 0.")) == ""
    assert killed_loader(ValueError(str(error.value))) == ""


def test_a_gradient_is_nan_in_one_step(tmp_path: Path) -> None:
    """stop_on_nonfinite reports the loss of the next step."""
    with pytest.raises(TrainkitError, match="not finite|nan"):
        fit(tmp_path, {"do": "nan", "step": 2}, stop_on_nonfinite=True)


def test_a_cut_checkpoint_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The damaged newest checkpoint is skipped, and the one before it is used."""
    with pytest.raises(RuntimeError):
        fit(tmp_path, {"do": "cut_checkpoint", "step": 5}, {"do": "raise", "step": 5})
    fit(tmp_path)
    assert "The one before it is taken" in capsys.readouterr().out


def test_steps_are_slow_from_a_step_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank takes longer per batch."""
    slept: list[float] = []
    monkeypatch.setattr(
        "trainkit.extensions.faults.callback.time", SimpleNamespace(sleep=slept.append)
    )
    fit(tmp_path, {"do": "slow", "step": 2, "seconds": 0.02})
    assert slept == 10 * [0.02]


@pytest.mark.parametrize(
    ("fault", "comes"),
    [
        ({"do": "nan", "step": 3}, True),
        ({"do": "kill", "step": 12}, False),
        ({"do": "kill", "step": 3, "rank": 1}, False),
        ({"do": "raise", "step": 3, "during": "recovery"}, False),
    ],
)
def test_a_fault_that_did_not_come_is_named(
    tmp_path: Path, fault: dict[str, Any], comes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that met no fault would otherwise look like one that survived it."""
    fit(tmp_path, fault)
    text = f"faults[0] did not come ({fault['do']} on rank {fault.get('rank', 0)})"
    assert (text in " ".join(capsys.readouterr().out.split())) != comes


def test_hosts_leave_and_join_the_list(tmp_path: Path) -> None:
    """The other lines do not change."""
    hosts = tmp_path / "hosts"
    hosts.write_text("a:2\nb:1\n")
    about = {"hosts_file": str(hosts)}
    fit(
        tmp_path,
        {"do": "drop_host", "host": "a", "step": 1} | about,
        {"do": "add_host", "host": "c:4", "step": 2} | about,
    )
    assert hosts.read_text() == "b:1\nc:4\n"


def test_every_deed_can_be_asked_for() -> None:
    """Every fault of the docstring exists."""
    for deed in DEEDS:
        FaultInjection([{"do": deed, "step": 1, "host": "a", "hosts_file": "f"}])
        FaultInjection([{"do": float("nan"), "step": 1}])  # what Hydra makes of nan
        assert deed in (FaultInjection.__doc__ or "")


def test_a_flipped_bit_is_one_bit(tmp_path: Path) -> None:
    """A weight differs by that bit from the step on; a bit that the elements lack is refused."""
    plain = fit(tmp_path / "a", max_steps=1)
    wrong = fit(tmp_path / "b", {"do": "flip", "step": 0, "bit": 31}, max_steps=1)
    assert not torch.equal(plain.model.weight, wrong.model.weight)
    assert flipped(torch.tensor([1.0, 1.0]), 31).tolist() == [-1.0, 1.0]
    with pytest.raises(ConfigError, match="bit is 32, and the elements of model have 32 bits"):
        fit(tmp_path / "c", {"do": "flip", "step": 0, "bit": 32}, max_steps=1)
