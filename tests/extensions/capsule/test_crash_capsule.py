"""CrashCapsule: contents of a failed step's capsule,
and a run that is never disturbed by writing it.
"""

from __future__ import annotations

import errno
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.by_hand import Pair
from tests.helpers.toy import Line, Net, loader, quiet, rows, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import CrashCapsule
from trainkit.checkpoint.format import read_safetensors
from trainkit.engine.collectives import PeerError
from trainkit.errors import ConfigError, DivergenceError
from trainkit.extensions.capsule.batches import unpack
from trainkit.extensions.capsule.folder import read
from trainkit.extensions.capsule.replay import replay
from trainkit.extensions.reports.status.status import _capsules


def poisoned(*indices: int, size: int = 24) -> TensorDataset:
    """Return rows of which some have a target that makes the loss not finite."""
    x_NI, y_NO = rows(size).tensors
    y_NO = y_NO.clone()
    y_NO[list(indices)] = float("nan")
    return TensorDataset(x_NI, y_NO)


def capsules(tmp_path: Path) -> list[str]:
    """Return the names of the capsules."""
    return sorted(path.name for path in (tmp_path / "capsules").glob("*"))


class Spared(Line):
    """Does not learn, so that its weights stay finite."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Drop gradients that are not finite."""
        for parameter in self.parameters():
            parameter.grad = None


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    """The manifest has the reason, place in the run, samples, contents, and settings of the run."""
    with pytest.raises(DivergenceError):
        trainer = quiet(
            tmp_path, callbacks=[CrashCapsule()], stop_on_nonfinite=True, accumulate_grad_batches=2
        )
        trainer.fit(Line(), loader(poisoned(13)))
    assert capsules(tmp_path) == ["step=1-rank=0"]
    about = json.loads((tmp_path / "capsules" / "step=1-rank=0" / "manifest.json").read_text())
    assert (about["why"], about["step"], about["epoch"], about["rank"], about["world_size"]) == (
        "the loss is nan",
        1,
        0,
        0,
        1,
    )
    assert (about["num_samples"], about["total_steps"], about["weights"]) == (
        8,
        3,
        "of this step, before its update",
    )
    first, second = about["microbatches"]
    assert (first["samples"], second["samples"]) == ([8, 9, 10, 11], [12, 13, 14, 15])
    assert isinstance(first["loss"], float) and second["loss"] == "nan"
    assert first["batch"] == ["batch[0] float32 [4, 3]", "batch[1] float32 [4, 1]"]
    assert about["settings"]["precision"] == "32-true" and about["task"].endswith("toy.Line")


def test_the_batches_are_those_of_the_step(tmp_path: Path) -> None:
    """The tensors of each microbatch are stored bit for bit, with its loss."""
    data = poisoned(13)
    quiet(tmp_path, callbacks=[CrashCapsule()]).fit(Spared(), loader(data))
    (taken,) = read(tmp_path / "capsules" / "step=3-rank=0").step["microbatches"]
    x, y = unpack(taken["batch"])
    assert torch.equal(x, data.tensors[0][12:16]) and torch.equal(
        y.isnan(), data.tensors[1][12:16].isnan()
    )
    assert taken["loss"].isnan() and (taken["num_samples"], taken["batch_idx"]) == (4, 3)


def test_the_weights_are_those_before_the_update(tmp_path: Path) -> None:
    """On the CPU the loss is known in time:
    the capsule has the weights, and the buffers as the step began.
    """
    begun: list[dict[str, torch.Tensor]] = []

    class Look(Callback):
        def on_train_step_start(self, trainer: Any, task: Any) -> None:
            begun.append({name: value.clone() for name, value in task.state_dict().items()})

    quiet(tmp_path, callbacks=[CrashCapsule(), Look()]).fit(Net(), loader(poisoned(13)))
    capsule = read(tmp_path / "capsules" / "step=3-rank=0")
    assert capsule.weights is not None
    kept = read_safetensors(capsule.weights)
    assert kept.keys() == begun[3].keys()
    assert all(torch.equal(kept[name], begun[3][name]) for name in kept)
    assert not torch.equal(begun[3]["model.1.running_mean"], begun[4]["model.1.running_mean"])


def test_a_spell_is_kept_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a series of steps with a non-finite loss only the first is stored;
    after finite losses, the next one is too.
    """
    quiet(tmp_path, callbacks=[CrashCapsule()]).fit(Spared(), loader(poisoned(0, 5, 13, 18)))
    assert capsules(tmp_path) == ["step=0-rank=0", "step=3-rank=0"]
    assert capsys.readouterr().out.count("Capsule: step") == 2


def test_no_more_than_asked_for_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """max_capsules limits the capsules per start, and the last one reports the limit."""
    quiet(tmp_path / "a", callbacks=[CrashCapsule(max_capsules=2)]).fit(
        Spared(), loader(poisoned(0, 8, 16))
    )
    assert capsules(tmp_path / "a") == ["step=0-rank=0", "step=2-rank=0"]
    assert capsys.readouterr().out.count("No more will be written (max_capsules=2)") == 1
    quiet(tmp_path / "b", callbacks=[CrashCapsule(max_capsules=0)]).fit(
        Spared(), loader(poisoned(0))
    )
    assert capsules(tmp_path / "b") == []


class Spoils(Callback):
    """Makes weights infinite before step 2, like an update with a bad gradient."""

    def __init__(self, act: Any = lambda trainer: None) -> None:
        self.act = act

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        if trainer.global_step == 2:
            self.act(trainer)
            with torch.no_grad():
                task.model.bias.fill_(float("inf"))


def test_the_step_that_spoilt_the_weights_is_kept(tmp_path: Path) -> None:
    """The step's own loss was finite; the next loss exposes its update.
    Its weights are gone: those of the start are stored.
    """
    quiet(tmp_path, callbacks=[CrashCapsule(), Spoils()]).fit(Line(), loader(24))
    assert capsules(tmp_path) == ["step=1-rank=0"]
    capsule = read(tmp_path / "capsules" / "step=1-rank=0")
    assert capsule.weights is not None and capsule.weights_age == 1
    assert torch.equal(read_safetensors(capsule.weights)["model.weight"], Line().model.weight)
    assert capsule.about["why"] == "its update made weights non-finite: the loss after it is inf"


def test_a_rank_whose_weights_another_spoilt_keeps_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank has stored that step for its own loss;
    this rank's batch would add no information.
    """

    def other(trainer: Any) -> None:
        (trainer.run_dir / "capsules" / "step=1-rank=7").mkdir(parents=True)

    quiet(tmp_path, callbacks=[CrashCapsule(), Spoils(other)]).fit(Line(), loader(24))
    assert capsules(tmp_path) == ["step=1-rank=7"]
    assert (
        "loss of rank 0 is inf at step 2, because weights are not finite" in capsys.readouterr().out
    )


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues, and the failure is reported once."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainkit.extensions.capsule.crash_capsule.write", full)
    trainer = quiet(tmp_path, callbacks=[CrashCapsule()])
    trainer.fit(Spared(), loader(poisoned(0, 8, 16)))
    assert trainer.global_step == 6
    assert (
        capsys.readouterr().out.count(
            "A capsule could not be written: [Errno 28] No space left on device"
        )
        == 1
    )


@pytest.mark.parametrize(
    ("error", "settings", "kept"),
    [
        (ValueError("strange"), {}, True),
        (ValueError("strange"), {"on_error": False}, False),
        (PeerError("another rank ended"), {}, False),
        (KeyboardInterrupt(), {}, False),
    ],
)
def test_errors_of_this_ranks_step_are_kept(
    tmp_path: Path, error: BaseException, settings: Any, kept: bool
) -> None:
    """An error in a step leaves a capsule if enabled;
    an error of another rank or the user does not.
    """

    class Fails(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise error
            return super().training_step(batch, batch_idx)

    with pytest.raises(type(error)):
        quiet(tmp_path, callbacks=[CrashCapsule(**settings)]).fit(Fails(), loader(24))
    assert capsules(tmp_path) == (["step=2-rank=0"] if kept else [])


def test_an_error_outside_of_steps_is_not_kept(tmp_path: Path) -> None:
    """An error in validation belongs to no step."""

    class Fails(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ValueError("strange")

    with pytest.raises(ValueError, match="strange"):
        quiet(tmp_path, callbacks=[CrashCapsule()], num_sanity_val_steps=0).fit(
            Fails(), loader(8), loader(4)
        )
    assert capsules(tmp_path) == []


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, {"assert_no_sync": True}],
)
def test_a_watched_run_is_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Without errors the weights at the end are bit-identical, and nothing is written."""
    watched, plain = Net(), Net()
    quiet(tmp_path, callbacks=[CrashCapsule()], **settings).fit(watched, loader(24))
    quiet(
        tmp_path, **{name: value for name, value in settings.items() if name != "assert_no_sync"}
    ).fit(plain, loader(24))
    assert torch.equal(weights(watched), weights(plain))
    assert not (tmp_path / "capsules").exists()


def test_writing_a_capsule_changes_nothing(tmp_path: Path) -> None:
    """A run that stored a step ends with the same bits, dropout included."""

    class Keeps(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            if trainer.global_step == 3:
                assert trainer.callbacks[0].keep_step(trainer, 1, "the test says so")

    watched, plain = Net(), Net()
    quiet(tmp_path, callbacks=[CrashCapsule(), Keeps()]).fit(watched, loader(24))
    quiet(tmp_path).fit(plain, loader(24))
    assert torch.equal(weights(watched), weights(plain))


def test_only_the_last_steps_stay_in_memory(tmp_path: Path) -> None:
    """The ring holds `keep` steps during the run, and none after it."""
    capsule = CrashCapsule(keep=2)
    held: list[list[int]] = []

    class Look(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            held.append([record.step for record in capsule._ring])

    quiet(tmp_path, callbacks=[capsule, Look()]).fit(Line(), loader(16))
    assert held == [[0], [0, 1], [1, 2], [2, 3]]
    assert not capsule._ring


def test_a_step_that_was_split_is_kept_as_it_was_taken(tmp_path: Path) -> None:
    """If a step was repeated for lack of memory, only the pieces of the last attempt count."""

    class Tight(Spared):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, callbacks=[CrashCapsule()], halve_batch_on_oom=True).fit(
        Tight(), loader(poisoned(3))
    )
    capsule = read(tmp_path / "capsules" / "step=0-rank=0")
    assert [taken["num_samples"] for taken in capsule.step["microbatches"]] == [2, 2]
    assert capsule.about["microbatches"][1]["loss"] == "nan"
    assert [microbatch["samples"] for microbatch in capsule.about["microbatches"]] == [
        [0, 1],
        [2, 3],
    ]


def test_a_buffer_that_is_replaced_is_followed(tmp_path: Path) -> None:
    """A module may replace a buffer by another tensor, of another shape too."""

    class Grows(Spared):
        def make_model(self) -> nn.Module:
            model = nn.Linear(3, 1)
            model.register_buffer("seen", torch.zeros(1))
            return model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.model.seen = torch.full((1 + batch_idx,), float(batch_idx))  # type: ignore[assignment]
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, callbacks=[CrashCapsule()]).fit(Grows(), loader(poisoned(13)))
    path = read(tmp_path / "capsules" / "step=3-rank=0").weights
    assert path is not None
    assert read_safetensors(path)["model.seen"].tolist() == [2.0, 2.0, 2.0]


def test_illegal_arguments_are_refused() -> None:
    """A ring of size 0 is refused."""
    with pytest.raises(
        ConfigError, match=r"callbacks\.capsule\.keep is 0; it must be a whole number, 1 or more"
    ):
        CrashCapsule(keep=0)


class Boom(Pair):
    """Fails after its updates of the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ValueError("boom")


@pytest.mark.parametrize(("task", "step"), [(Pair([1.0, 1.0, 1.0, math.nan, 1.0]), 6), (Boom(), 4)])
def test_a_batch_that_is_updated_by_hand_is_kept(
    task: Any, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of updates before it, whatever they are within it; replay says why it cannot."""
    capsule = CrashCapsule()
    ending = pytest.raises(ValueError, match="boom") if step == 4 else nullcontext()
    with ending:
        quiet(tmp_path, callbacks=[capsule]).fit(task, loader(20))
    folder = tmp_path / f"capsules/step={step}-batch={step // 2}-rank=0"
    assert capsule.written == [str(folder)]
    said = capsys.readouterr().out
    assert "is stored (" in said and "trainkit replay" not in said
    assert all("replay" not in alert.text for alert in _capsules(tmp_path))
    with pytest.raises(ConfigError, match="automatic_optimization = False.*are in the capsule"):
        replay(folder, Pair())
