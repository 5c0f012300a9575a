"""conf=resnet50_a3 and conf=vit_b16, made small:
they learn, and repeated augmentation is the same on two ranks as on one.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.launching import Command
from tests.helpers.pictures import write_pictures

NOISE = (
    "data=synthetic data.num_classes=4 data.num_samples=240 data.image_size=32 data.batch_size=12"
    " trainer.global_batch_size=12 "
)
SHORT = (
    "trainer.max_epochs=2 trainer.lr_warmup_epochs=null trainer.lr_warmup_steps=5"
    " trainer.log_every_n_steps=1 "
)
VIT = (
    "task.model=timm:vit_tiny_patch16_224 '~task.model_options.image_size'"
    " +task.model_options.img_size=32 +task.model_options.depth=2 +task.model_options.embed_dim=48 "
)
SMALL = {
    "resnet50_a3": "task.model=resnet18 trainer.lr_reference_batch_size=12 ",
    "vit_b16": (
        VIT + "trainer.lr_reference_batch_size=12 optimizer.lr=2e-3 callbacks.ema.decay=0.9 "
    ),
}


def column(run: Path, name: str) -> list[float]:
    """Return a column of metrics.csv."""
    return [
        float(row[name])
        for row in csv.DictReader((run / "metrics.csv").read_text().splitlines())
        if row.get(name)
    ]


@pytest.mark.parametrize("conf", SMALL)
def test_a_recipe_learns(conf: str, command: Command, tmp_path: Path) -> None:
    """Within 40 steps on a small model and noise the training loss falls;
    batch norm's statistics need more for validation.
    """
    done = command(f"python -m trainkit fit conf={conf} {NOISE}{SHORT}{SMALL[conf]}run_dir=run")
    assert done.code == 0, done.text
    first, last = column(tmp_path / "run", "train/loss_epoch")
    assert last < first
    assert ("EMA: validation" in done.out) == (conf == "vit_b16")


@pytest.mark.parallel
def test_repeated_augmentation_is_the_same_on_two_ranks(command: Command, tmp_path: Path) -> None:
    """Three copies of each image in a step, on image files with all of DeiT's augmentation:
    the losses are equal.
    """
    write_pictures(tmp_path / "images", 48, 4, size=40)
    line = (
        "data.root=images data.num_classes=4 data.image_size=32 data.num_workers=1"
        f" {SHORT}{SMALL['vit_b16']}optimizer=sgd "
    )
    line += "optimizer.lr=0.1 data.augment.repeats=3 data.batch_size=6 trainer.global_batch_size=12"
    losses = []
    for name, start in (
        ("one", "python -m trainkit"),
        ("two", "torchrun --nproc-per-node 2 -m trainkit"),
    ):
        done = command(f"{start} fit conf=vit_b16 {line} run_dir={name}")
        assert done.code == 0, done.text
        losses.append(
            column(tmp_path / name, "train/loss_epoch") + column(tmp_path / name, "val/loss")
        )
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
