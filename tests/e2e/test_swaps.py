"""One step of recipes with other parts, on models and data made small.

Which choices fit, and with which numbers, is composed for all pairs in
tests/unit/config/test_swaps.py. Here each data set, task and augmentation takes a step in each
recipe that it fits; each optimizer and schedule in a third of the recipes, and in all that refuse
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Command
from tests.helpers.pictures import write_pictures
from tests.unit.config.test_swaps import FAMILIES, GROUPS, TOPS, chosen

COMMON = (
    "trainer.max_steps=1 trainer.limit_val_batches=1 trainer.num_sanity_val_steps=0 logger=none "
    "callbacks=none trainer.enable_checkpointing=false run_dir=r trainer.global_batch_size=null "
    "trainer.lr_reference_batch_size=null "
)
# What makes a choice of data or of a task small; all else is as shipped.
SMALL_DATA = {
    "digits": "data.batch_size=6 ",
    "imagefolder": "data.batch_size=6 data.root=images data.num_classes=4 data.num_workers=0 ",
    "synthetic": "data.batch_size=6 data.num_samples=24 data.num_classes=4 ",
    "tokens": "data.context=32 ",
    "masked_tokens": "data.context=32 ",
    "ratings": "data.num_ratings=2000 ",
}
_VIT = (
    "'task.model={_target_: torchvision.models.VisionTransformer, image_size: ${data.image_size},"
    " patch_size: 32, num_layers: 2, num_heads: 2, hidden_dim: 32, mlp_dim: 32,"
    " num_classes: ${data.num_classes}}' '~task.model_options' "
)
SMALL_TASK = {
    "resnet50": "task.model=resnet18 ",
    "vit_b16": _VIT,
    "gpt_124m": "task.model.depth=1 task.model.width=32 task.model.heads=2 ",
    "bert": "task.model.depth=1 task.model.width=32 task.model.heads=2 ",
}
# Else the first step computes bases of 3,072 x 3,072 numbers.
SMALL_OPTIMIZER = {"soap": "optimizer.max_precondition_dim=64 "}
# Pairs that compose, and are one sentence before the first step: conf, group, choice -> its text.
REFUSED = {
    ("vit_b16", "augment", "a3"): "train_image_size is 160, and the model takes 224 x 224",
    (
        "vit_b16",
        "augment",
        "trivialaugment",
    ): "train_image_size is 176, and the model takes 224 x 224",
    # the one matrix is the head
    ("recommender", "optimizer", "muon"): "Linear has no matrix for Muon",
    ("resnet18", "optimizer", "muon"): "ResNet has no matrix for Muon, which takes no convolutions",
    ("resnet50", "optimizer", "muon"): "ResNet has no matrix for Muon, which takes no convolutions",
    (
        "resnet50_a3",
        "optimizer",
        "muon",
    ): "ResNet has no matrix for Muon, which takes no convolutions",
    ("resnet50_a3", "task", "vit_b16"): "train_image_size is 160, and the model takes 224 x 224",
    ("mlp", "task", "vit_b16"): "'image_size': 8",
    ("resnet18", "task", "mlp"): "so an image is 3072 numbers (3 x 32 x 32)",
    ("resnet50", "task", "mlp"): "so an image is 3072 numbers (3 x 32 x 32)",
    ("resnet50_a3", "task", "mlp"): "so an image is 150528 numbers (3 x 224 x 224)",
    ("vit_b16", "task", "mlp"): "so an image is 150528 numbers (3 x 224 x 224)",
}
# webdataset needs tars, ray a cluster, a mixture folders of tokens: tests/e2e/test_shards.py,
# tests/ray/test_data.py and tests/e2e/test_pretraining_page.py.
ELSEWHERE = ("webdataset", "ray", "token_mixture")
SHARED = 3  # recipes that share the steps of an optimizer or a schedule


def swaps(conf: str) -> list[tuple[str, str]]:
    """Return the choices (group, name) of parts that take a step in a conf, without its own."""
    family = next(one for one in FAMILIES if conf in one)
    own, turn = chosen(conf), TOPS.index(conf)
    return [
        (group, name)
        for group in ("augment", "data", "lr", "optimizer", "task")
        for place, name in enumerate(GROUPS[group])
        if group in own and name != own[group] and name not in ELSEWHERE
        if group not in ("data", "task") or name in family
        if group not in ("lr", "optimizer")
        or (turn + place) % SHARED == 0
        or (conf, group, name) in REFUSED
    ]


@pytest.mark.parametrize("group", ["lr", "optimizer"])
def test_each_choice_takes_a_step_in_some_recipe(group: str) -> None:
    """None is left out, whatever the number of recipes and choices; or it is a recipe's own."""
    tried = {name for conf in TOPS for kind, name in swaps(conf) if kind == group}
    assert tried | {chosen(conf).get(group) for conf in TOPS} >= {*GROUPS[group]}


@pytest.mark.parametrize("conf", TOPS)
def test_a_recipe_steps_with_each_part(conf: str, command: Command, tmp_path: Path) -> None:
    """Each choice trains a step, or is refused in one sentence that names a key and what to set."""
    write_pictures(tmp_path / "images", 24, 4, size=40)
    assert swaps(conf)
    for group, name in swaps(conf):
        parts = chosen(conf) | {group: name}
        refusal = REFUSED.get((conf, group, name))
        small = SMALL_DATA.get(parts["data"], "")
        # what is refused names the model
        small += SMALL_TASK.get(parts["task"], "") if refusal is None else ""
        small += SMALL_OPTIMIZER.get(parts["optimizer"], "")
        done = command(f"python -m trainkit fit conf={conf} {group}={name} {COMMON}{small}")
        if refusal is None:
            assert done.code == 0, f"{conf} {group}={name}: {done.text[-3000:]}"
        else:
            assert done.code == 2, f"{conf} {group}={name}: {done.text[-3000:]}"
            assert refusal in " ".join(done.err.split()), done.err
            assert "Traceback" not in done.text
