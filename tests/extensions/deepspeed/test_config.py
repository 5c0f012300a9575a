"""DeepSpeed's config is written from trainkit's settings; the user's own must agree with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extensions.deepspeed.config import DeepSpeedOptions, read_config, write_config
from trainkit.extensions.deepspeed.sections import check_optimizer

SETTINGS = StepSettings(
    batch_size=4, accumulate=3, clip_val=0.5, clip_algorithm="norm", precision="32-true"
)


def written(
    user: dict[str, Any], settings: StepSettings = SETTINGS, **options: Any
) -> dict[str, Any]:
    """The config that DeepSpeed would get on two ranks."""
    optimizer = torch.optim.AdamW(
        torch.nn.Linear(2, 2).parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
    )
    return write_config(settings, DeepSpeedOptions(**options).resolved(user), user, 2, optimizer)


def test_trainkits_settings_are_written() -> None:
    """Without a config of the user all values are trainkit's."""
    assert written({}, stage=3, offload_optimizer="cpu") == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 24,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "gradient_allreduce_op": "mean",
        "managed_gradient_accumulation": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }


def test_auto_is_filled_and_the_rest_is_passed_on() -> None:
    """Values of trainkit take the place of "auto"; "auto" of others vanishes;
    what trainkit has no value for stays.
    """
    user = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "steps_per_print": 100,
    }
    config = written(user)
    assert config["train_batch_size"] == 24
    assert config["bf16"] == {"enabled": False}
    assert config["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert config["steps_per_print"] == 100
    assert "optimizer" not in config
    # the user's own is left as it is
    assert user["zero_optimization"]["reduce_bucket_size"] == "auto"


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            r"per_gpu is 8, but .*data\.batch_size\) is 4: two sources",
        ),
        ({"gradient_accumulation_steps": 1}, r"is 1, but trainer\.accumulate_grad_batches is 3"),
        (
            {"train_batch_size": 12},
            r"train_batch_size is 12, but the batch of a step on 2 ranks is 24",
        ),
        (
            {"gradient_clipping": 1.0},
            r"gradient_clipping is 1\.0, but trainer\.gradient_clip_val is 0\.5",
        ),
        (
            {"bf16": {"enabled": True}},
            r"bf16\.enabled is true, but trainer\.precision.*precision=bf16-mixed",
        ),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled is true, but trainer\.precision"),
        (
            {"gradient_allreduce_op": "sum"},
            r"gradient_allreduce_op is 'sum', but the engine, which turns",
        ),
        (
            {"zero_force_ds_cpu_optimizer": True},
            r"zero_force_ds_cpu_optimizer is true, but the Task",
        ),
        (
            {"optimizer": {"type": "Lamb"}},
            r"optimizer\.type is 'Lamb', but the Task's optimizer is AdamW: two sources",
        ),
        (
            {"optimizer": {"params": {"lr": 0.1}}},
            r"optimizer\.params\.lr is 0\.1, but lr of the Task's AdamW is 0\.01",
        ),
        (
            {"optimizer": {"params": {"freeze_step": 2}}},
            r"freeze_step is 2, but the Task's AdamW has no such setting",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
            r"params has no weight_decay, which is 0 in DeepSpeed, .* Task's AdamW is 0\.1",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            r"type is 'Adam', which DeepSpeed computes as Adam \(its adam_w_mode is false\)",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            r"scheduler is 'WarmupLR', but the rates are those of the Task's schedule",
        ),
        (
            {"torch_autocast": {"enabled": True}},
            r"has 'torch_autocast', which trainkit does not pass on",
        ),
        (
            {"zero_optimization": 3},
            r"engine\.config's zero_optimization is 3; it must be a mapping",
        ),
    ],
)
def test_two_sources_that_differ_are_refused(user: dict[str, Any], words: str) -> None:
    """The message names both, with their values."""
    with pytest.raises(ConfigError, match=words):
        written(user)


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (
            {"activation_checkpointing": {"partition_activations": True}},
            r"'activation_checkpointing'.* no effect here; trainer\.activation_checkpointing=true",
        ),
        ({"checkpoint": {"load_universal": True}}, r"'checkpoint'.* no effect .* trainkit's own"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, r"'datastates_ckpt'.* no effect here"),
        ({"dataloader_drop_last": True}, r"'dataloader_drop_last'.* no effect .* feeds the data"),
        ({"compile": {"deepcompile": True}}, r"'compile'.* no effect here; .* nothing is compiled"),
    ],
)
def test_sections_without_effect_are_refused(user: dict[str, Any], words: str) -> None:
    """Only calls that trainkit never makes read them; one that asks for nothing is left out."""
    with pytest.raises(ConfigError, match=words):
        written(user)
    (name,) = user
    for section in ({"enabled": False, "size": 3}, {"a": False, "b": None, "c": "auto"}, False):
        assert name not in written({name: section})


def adam_beside(params: dict[str, Any], decay: float) -> None:
    """Compare a section of type Adam with a Task's torch.optim.Adam."""
    weights = torch.nn.Linear(2, 2).parameters()
    check_optimizer(
        {"type": "Adam", "params": params}, torch.optim.Adam(weights, weight_decay=decay)
    )


def test_adam_is_adamw_in_deepspeed() -> None:
    """A section of type Adam with weight decay fits a Task's AdamW, and its Adam only with
    adam_w_mode false; without decay both are the same update.
    """
    written({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}})
    adam_beside({"adam_w_mode": False, "weight_decay": 0.1}, 0.1)
    adam_beside({}, 0.0)
    with pytest.raises(ConfigError, match=r"computes as AdamW .* true\), but .* is Adam with"):
        adam_beside({"weight_decay": 0.1}, 0.1)


@pytest.mark.parametrize(
    ("user", "options", "words"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            {"stage": 2},
            r"zero_optimization\.stage is 3, but engine\.stage is 2",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"offload_optimizer": "none"},
            r"offload_optimizer\.device is 'cpu', but engine\.offload_optimizer is 'none'",
        ),
        (
            {"zero_optimization": {"stage": 0}},
            {},
            r"zero_optimization\.stage is 0; it must be 1, 2 or 3",
        ),
        (
            {},
            {"offload_param": "cpu"},
            r"engine\.offload_param is 'cpu', but engine\.stage is 2: only stage 3 splits weights",
        ),
        (
            {},
            {"offload_optimizer": "nvme", "nvme_path": "d"},
            r"is 'nvme', but engine\.stage is 2: DeepSpeed moves to disk in",
        ),
        (
            {},
            {"stage": 3, "offload_optimizer": "nvme"},
            r"is 'nvme'; give the folder of the disk as engine\.nvme_path",
        ),
        ({}, {"nvme_path": "disk"}, r"engine\.nvme_path is 'disk', but nothing is moved there"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    user: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    """So are options of the engine that differ from the user's config."""
    with pytest.raises(ConfigError, match=words):
        written(user, **options)


def test_the_users_stage_and_places_stand_if_the_engine_has_none() -> None:
    """What the config names, the options need not repeat."""
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "disk", "buffer_count": 4}}
    section = written({"zero_optimization": zero})["zero_optimization"]
    assert section == zero
    assert DeepSpeedOptions().resolved({}) == DeepSpeedOptions(2, "none", "none", None)


def test_a_stream_of_unknown_batches_needs_no_number() -> None:
    """DeepSpeed gets the user's number, or 1."""
    unknown = StepSettings(None, 1, None, "norm", "32-true")
    assert written({}, unknown)["train_batch_size"] == 2
    assert written({"train_micro_batch_size_per_gpu": 5}, unknown)["train_batch_size"] == 10


def test_a_config_is_read_from_a_file(tmp_path: Path) -> None:
    """A file of JSON serves as a mapping does; another file is refused by its name."""
    good, bad = tmp_path / "ds.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"steps_per_print": 7}))
    assert read_config(str(good)) == {"steps_per_print": 7}
    bad.write_text("{stage: 2}")
    for path, words in (
        (bad, "which is not JSON"),
        (tmp_path / "no.json", "cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(str(path))
