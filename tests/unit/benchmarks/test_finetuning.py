"""The benchmark of fine-tuning: what is counted, and that all contenders train the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks import finetuners, finetuning
from benchmarks.finetuning import BY_HAND, BY_ROWS, OURS, SHORT, TRL, Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return the shortest form."""
    return Bench(SHORT, tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("lora", [False, True])
def test_trainkit_has_the_losses_of_the_loop_by_hand(
    lora: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TRL the shortest form measures the two others, packed and padded; their losses in
    float32 are equal step by step, and TRL is named as missing.
    """
    monkeypatch.setattr(finetuners, "absent", lambda modules: dict.fromkeys(modules, "not there"))
    speeds = finetuning.table(bench, lora, lambda name, mode, lora: 1.0)
    assert [row[0] for row in speeds.rows] == [BY_HAND, OURS]
    assert all(cell is not None for row in speeds.rows for cell in row)
    assert TRL in finetuners.missing()


def test_another_training_is_no_contender(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that differs ends the measuring: a figure would mean nothing."""

    def other(work: finetuners.Work, folder: str) -> None:
        finetuners.by_hand(work, folder)
        work.losses[-1] = work.losses[-1] + 1e-3

    monkeypatch.setitem(finetuners.CONTENDERS, OURS, other)
    monkeypatch.setattr(finetuning, "missing", lambda: dict.fromkeys((TRL, BY_ROWS), ""))
    with pytest.raises(AssertionError, match="trainkit"):
        bench.seconds("packed", lora=False)


def test_padding_is_no_token(bench: Bench) -> None:
    """Tokens are those of documents, equal in both layouts; padded rows compute more positions."""
    packed, padded = (bench.data[mode] for mode in finetuning.MODES)
    assert sum(packed.tokens) == sum(padded.tokens) == len(packed.train.documents.tokens)
    batch = next(iter(padded.train_dataloader()))
    assert padded.tokens[0] == int(batch["attention_mask"].sum())
    assert 1 <= bench.positions("packed") < bench.positions("padded")
    assert torch.equal(batch["input_ids"][0, :8], padded.train[0][0].ids[:8])


def test_a_step_has_the_least_time_of_its_rounds() -> None:
    """Other work slows a step of one round and another of the next."""
    assert finetuning.least([[1.0, 9.0], [5.0, 2.0]]) == 3.0
    assert finetuning.spread([[1.0, 1.0], [2.0, 2.0]], [[2.0, 2.0], [2.0, 2.0]]) == "1.00 to 2.00"
