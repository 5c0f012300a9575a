"""Averages of weights, finetuning and optimizers from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_main_job import read_rows
from tests.helpers.launching import Command


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "callbacks=ema",
            (
                "EMA: validation, checkpoints and the end of the run use averaged weights (decay"
                " 0.999, beginning smaller: warmup=True)."
            ),
        ),
        (
            "'callbacks=[early_stopping,ema]' callbacks.ema.decay=0.99",
            "averaged weights (decay 0.99, beginning smaller: warmup=True).",
        ),
        ("callbacks=swa", "SWA: the model holds the average of 2 epochs' weights."),
        ("optimizer=lars optimizer.lr=20", "20 x 1 rank = 20"),
        ("optimizer=lamb optimizer.lr=0.01", "0.01 x 1 rank = 0.01"),
        ("optimizer=muon optimizer.lr=0.01", "0.01 x sqrt(1 rank) = 0.01"),
        ("optimizer=ademamix optimizer.lr=0.003", "0.003 x sqrt(1 rank) = 0.003"),
        ("optimizer=soap", "0.003 x sqrt(1 rank) = 0.003"),
        ("optimizer=adafactor", "0.01 x sqrt(1 rank) = 0.01"),
        (
            "optimizer=schedule_free optimizer.lr=0.01 lr=constant",
            "validation, checkpoints and the end of the run use those of its eval().",
        ),
    ],
)
def test_an_option_trains_as_well(
    overrides: str, words: str, command: Command, tmp_path: Path
) -> None:
    """A run with the option learns, reports the option,
    and its best checkpoint validates to its best value.
    """
    done = command(f"python -m trainkit fit conf=mlp run_dir=here {overrides}")
    assert done.code == 0, done.text
    assert words in done.out
    best = max(float(row["val/acc"]) for row in read_rows(tmp_path / "here") if row["val/acc"])
    assert best > 0.9
    if "callbacks" in overrides or "schedule_free" in overrides:
        validated = command("python -m trainkit validate conf=mlp ckpt_path=best run_dir=here")
        assert f" {best:.6g} " in validated.out, validated.text


def test_a_part_can_be_frozen(command: Command) -> None:
    """callbacks=finetuning freezes the named modules,
    and an unknown name is refused with those that exist.
    """
    start = "python -m trainkit fit conf=mlp callbacks=finetuning trainer.max_epochs=2"
    done = command(
        f"{start} 'callbacks.finetuning.backbone=[model.1]'"
        " callbacks.finetuning.unfreeze_backbone_at_epoch=1"
    )
    assert "Finetuning: model.1 not trained before epoch 2." in done.out, done.text
    refused = command(start)
    assert refused.code == 2
    assert (
        "backbone is 'backbone', which is no module of ImageClassifier. In ImageClassifier there"
        " are model." in refused.err
    )
