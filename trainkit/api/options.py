"""The Trainer's arguments in groups, each frozen;
the names are those of the constructor, which documents them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import torch

from trainkit.data.bad_samples import DEFAULT_LIMIT
from trainkit.data.seeding import seed_of_user
from trainkit.device.precision import PrecisionName
from trainkit.device.torch_flags import Float32Matmul
from trainkit.engine.base import Engine
from trainkit.engine.step_settings import Communication, communication_of
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import Scaling

Limit = int | float | None  # a count of microbatches of each rank, or a share of the data
_Group = TypeVar("_Group")


@dataclass(frozen=True)
class BatchOptions:
    """Batch and learning rate."""

    global_batch_size: int | None
    accumulate_grad_batches: int | dict[int, int] | None
    pad_last_step: bool
    rank_shares: list[int] | None
    limit_train_batches: Limit
    overfit_batches: Limit
    lr_scaling: Scaling
    lr_reference_batch_size: int | None
    lr_warmup_steps: int | None
    lr_warmup_epochs: float | None
    lr_momentum_correction: bool

    def __post_init__(self) -> None:
        if self.lr_scaling == "none" and self.lr_reference_batch_size is not None:
            raise ConfigError(
                f"trainer.lr_reference_batch_size is {self.lr_reference_batch_size}, but"
                " trainer.lr_scaling is 'none': rates are not scaled, so it has no effect. Leave"
                " it out, or use trainer.lr_scaling=linear or sqrt."
            )
        shares = self.rank_shares
        if shares is not None and (
            not shares or any(type(share) is not int or share < 1 for share in shares)
        ):
            raise ConfigError(
                f"trainer.rank_shares is {list(shares)}; it must be one whole number of 1 or more"
                " for each rank, as [3,1]."
            )


@dataclass(frozen=True)
class LimitOptions:
    """When training ends, and how often it logs."""

    max_epochs: int | None
    max_steps: int | None
    min_epochs: int | None
    min_steps: int | None
    is_endless: bool  # whether the user asked for no limit
    log_every_n_steps: int

    def __post_init__(self) -> None:
        for unit, least, most in (
            ("epochs", self.min_epochs, self.max_epochs),
            ("steps", self.min_steps, self.max_steps),
        ):
            if least is not None and most is not None and least > most:
                raise ConfigError(
                    f"trainer.min_{unit} is {least}, but trainer.max_{unit} is {most}: training"
                    " ends there. Raise the one or lower the other."
                )

    @property
    def is_known(self) -> bool:
        """Whether the end of training is set, or no end is asked for."""
        return self.is_endless or self.max_epochs is not None or self.max_steps is not None

    def allow_stop(self, epochs: int, steps: int) -> bool:
        """Return whether a requested stop may end training after these."""
        return epochs >= (self.min_epochs or 0) and steps >= (self.min_steps or 0)


@dataclass(frozen=True)
class EvaluationOptions:
    """When validation runs, and on how much of the data."""

    val_check_interval: int | float | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None  # None for all
    limit_val_batches: Limit
    limit_test_batches: Limit
    limit_predict_batches: Limit

    def __post_init__(self) -> None:
        if self.val_check_interval == 0:
            raise ConfigError(
                "trainer.val_check_interval is 0; it must be a whole number of steps, 1 or more, or"
                " a share of an epoch above 0.0 and up to 1.0. To leave validation out:"
                " trainer.limit_val_batches=0."
            )


@dataclass(frozen=True)
class NumericOptions:
    """How a step computes."""

    precision: PrecisionName
    channels_last: bool | Literal["auto"]
    compile: bool | str
    sync_batchnorm: bool
    halve_batch_on_oom: bool
    activation_checkpointing: bool | list[str]
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    deterministic: bool | Literal["warn"]
    benchmark: bool
    float32_matmul_precision: Float32Matmul | None
    detect_anomaly: bool
    stop_on_nonfinite: bool
    assert_no_sync: bool

    def __post_init__(self) -> None:
        if self.gradient_clip_val is None and self.gradient_clip_algorithm != "norm":
            raise ConfigError(
                f"trainer.gradient_clip_algorithm is '{self.gradient_clip_algorithm}', but"
                " trainer.gradient_clip_val is not set, or 0: nothing is clipped. Set"
                " trainer.gradient_clip_val, or leave the algorithm out."
            )
        if self.float32_matmul_precision is not None and self.precision == "64-true":
            raise ConfigError(
                f"trainer.float32_matmul_precision is '{self.float32_matmul_precision}', and"
                " trainer.precision is '64-true': no product is in float32. Leave it out."
            )

    def uses_channels_last(self, device: torch.device) -> bool:
        """Whether weights and inputs of four dimensions take that memory format on this device."""
        return device.type == "cuda" if self.channels_last == "auto" else self.channels_last


@dataclass(frozen=True)
class SampleOptions:
    """How samples are read: what happens to one that cannot be loaded,
    and when loaders are made again.
    """

    on_bad_sample: Literal["raise", "skip"]
    on_bad_sample_limit: int | None
    reload_dataloaders_every_n_epochs: int

    def __post_init__(self) -> None:
        if self.on_bad_sample == "raise" and self.on_bad_sample_limit is not None:
            raise ConfigError(
                f"on_bad_sample_limit is {self.on_bad_sample_limit}, but on_bad_sample is 'raise':"
                " the first bad sample ends the run. Set on_bad_sample=skip, or leave the limit"
                " out."
            )

    @property
    def limit(self) -> int | None:
        """Different samples that may be skipped; None if none may."""
        return None if self.on_bad_sample == "raise" else self.on_bad_sample_limit or DEFAULT_LIMIT


@dataclass(frozen=True)
class Options:
    """All arguments of a Trainer except its callbacks.

    Attributes:
        config: the config that the Trainer was built from, if any, as it may leave the process.
        masked_values: secrets that it leaves out.
    """

    engine: Engine | str
    batch: BatchOptions
    limits: LimitOptions
    evaluation: EvaluationOptions
    numerics: NumericOptions
    samples: SampleOptions
    communication: Communication
    run_dir: str | None
    seed: int
    fast_dev_run: int
    config: dict[str, Any] | None = None
    masked_values: tuple[str, ...] = field(default=(), repr=False)


# Lightning's short names of precisions; 16 and "16" are the same.
_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
_OF_NULL = {
    "precision": "32-true",
    "num_sanity_val_steps": 2,
    "logger": True,
    "deterministic": False,
    "benchmark": False,
}
_OF_NULL |= {"log_every_n_steps": 50}
_OF_NULL |= dict.fromkeys(
    ("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), True
)


def canonical(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments with Lightning's other ways to write a value replaced:
    null, -1, 0, "bf16", ...
    """
    given = dict(arguments)
    given |= {name: value for name, value in _OF_NULL.items() if given[name] is None}
    given["precision"] = _PRECISIONS.get(str(given["precision"]), given["precision"])
    given["is_endless"] = given["max_epochs"] == -1
    for name, stands_for_null in (
        ("max_epochs", -1),
        ("max_steps", -1),
        ("num_sanity_val_steps", -1),
        ("gradient_clip_val", 0),
        ("overfit_batches", 0),
    ):
        if given[name] == stands_for_null:
            given[name] = None
    for kind in ("train", "val", "test", "predict"):
        name = f"limit_{kind}_batches"
        if isinstance(given[name], float) and given[name] == 1:
            given[name] = None  # all, as in Lightning, also of a stream
    return given


def read_options(arguments: Mapping[str, Any]) -> Options:
    """Return the Trainer's canonical arguments in groups, with `overfit_batches` and `fast_dev_run`
    applied.

    Raises:
        ConfigError: two of them contradict each other, or one has no effect.
    """
    given = dict(arguments)
    overfit = given["overfit_batches"]
    if overfit is not None:
        if (given["limit_train_batches"], given["limit_val_batches"]) != (None, None):
            why = "limit_train_batches or limit_val_batches is set too"
            raise ConfigError(
                f"trainer.overfit_batches is {overfit}, but {why}. Leave one out (null is for all)."
            )
        given["limit_train_batches"] = given["limit_val_batches"] = overfit
    if quick := int(given["fast_dev_run"]):
        given |= {
            "max_epochs": 1,
            "max_steps": None,
            "min_epochs": None,
            "min_steps": None,
            "num_sanity_val_steps": 0,
        }
        given |= {"val_check_interval": None, "check_val_every_n_epoch": 1}
        given |= {f"limit_{kind}_batches": quick for kind in ("train", "val", "test", "predict")}

    def group(kind: type[_Group]) -> _Group:
        return kind(**{own.name: given[own.name] for own in fields(kind)})  # type: ignore[arg-type]

    return Options(
        given["engine"],
        group(BatchOptions),
        group(LimitOptions),
        group(EvaluationOptions),
        group(NumericOptions),
        group(SampleOptions),
        communication_of(given["communication"]),
        given["run_dir"],
        seed_of_user() if given["seed"] is None else given["seed"],
        quick,
    )
