"""ResumeRecorder changes nothing in the run, and records each rank's samples."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.helpers.toy import Net, loader, quiet, weights
from trainkit.extensions.check_resume.recorder import ResumeRecorder, digests


def test_a_run_with_a_witness_is_the_same_run(tmp_path: Path) -> None:
    """Dropout, batch norm and the order of samples equal those of a run without it, to the bit,
    also when it saves.
    """
    alone, watched = Net(), Net()
    quiet(tmp_path / "alone", max_steps=5).fit(alone, loader(shuffle=True))
    witness = ResumeRecorder(str(tmp_path / "notes"), end_at=5, save_at=3)
    quiet(tmp_path / "watched", max_steps=5, callbacks=witness).fit(watched, loader(shuffle=True))
    assert torch.equal(weights(watched), weights(alone))
    assert (tmp_path / "watched" / "checkpoints" / "check-resume-step=3").is_dir()
    assert (tmp_path / "notes" / "end").is_dir()


def test_the_notes_hold_every_sample_once(tmp_path: Path) -> None:
    """An epoch's record has a line per step, and each of the data's indices once."""
    witness = ResumeRecorder(str(tmp_path / "notes"), end_at=6)
    quiet(tmp_path, max_epochs=1, callbacks=witness, accumulate_grad_batches=2).fit(
        Net(), loader(shuffle=True)
    )
    lines = [
        json.loads(line) for line in (tmp_path / "notes" / "rank0.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sorted(index for line in lines for index in line["indices"]) == list(range(23))
    assert len({sample for line in lines for sample in line["samples"]}) == 23


def test_a_sample_has_a_hash_of_its_own() -> None:
    """A sample has the same hash in another batch; a batch not divided by samples has one hash."""
    x_NI = torch.arange(12.0).reshape(4, 3)
    assert digests({"x": x_NI})[2] == digests({"x": x_NI[2:]})[0]
    assert digests([x_NI, x_NI[:, :1]])[0] != digests([x_NI, x_NI[:, 1:2]])[0]
    (one,) = digests((x_NI, "text"))
    assert one.startswith("batch ")


def test_names_stand_in_the_order_of_the_optimizers_state(tmp_path: Path) -> None:
    """names.json calls each optimizer's parameters in the order
    in which a checkpoint numbers them.
    """
    witness = ResumeRecorder(str(tmp_path / "notes"), end_at=1)
    task = Net()
    quiet(tmp_path, max_steps=1, callbacks=witness).fit(task, loader())
    names = json.loads((tmp_path / "notes" / "names.json").read_text())
    assert names["optimizers"] == [[name for name, _ in task.named_parameters()]]
    assert "model.1.running_mean" not in names["parameters"]
