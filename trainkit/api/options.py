"""The Trainer's arguments in groups, each frozen; the names are those of the constructor, which documents them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch

from trainkit.data.bad_samples import DEFAULT_LIMIT
from trainkit.device.precision import PrecisionName
from trainkit.engine.base import Engine
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
                f"trainer.lr_reference_batch_size is {self.lr_reference_batch_size}, but trainer.lr_scaling is 'none': rates "
                "are not scaled, so it has no effect. Leave it out, or use trainer.lr_scaling=linear or sqrt."
            )


@dataclass(frozen=True)
class LimitOptions:
    """When training ends, and how often it logs."""

    max_epochs: int | None
    max_steps: int | None
    log_every_n_steps: int


@dataclass(frozen=True)
class EvaluationOptions:
    """When validation runs, and on how much of the data."""

    val_check_interval: int | None
    check_val_every_n_epoch: int
    num_sanity_val_steps: int
    limit_val_batches: Limit
    limit_test_batches: Limit
    limit_predict_batches: Limit


@dataclass(frozen=True)
class NumericOptions:
    """How a step computes."""

    precision: PrecisionName
    channels_last: bool | Literal["auto"]
    compile: bool | str
    sync_batchnorm: bool
    halve_batch_on_oom: bool
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    deterministic: bool
    benchmark: bool
    detect_anomaly: bool
    stop_on_nonfinite: bool
    assert_no_sync: bool

    def __post_init__(self) -> None:
        if self.gradient_clip_val is None and self.gradient_clip_algorithm != "norm":
            raise ConfigError(
                f"trainer.gradient_clip_algorithm is '{self.gradient_clip_algorithm}', but trainer.gradient_clip_val is not "
                "set: nothing is clipped. Set trainer.gradient_clip_val, or leave the algorithm out."
            )

    def uses_channels_last(self, device: torch.device) -> bool:
        """Whether weights and inputs of four dimensions take that memory format on this device."""
        return device.type == "cuda" if self.channels_last == "auto" else self.channels_last


@dataclass(frozen=True)
class SampleOptions:
    """What happens to a sample whose loading raises."""

    on_bad_sample: Literal["raise", "skip"]
    on_bad_sample_limit: int | None

    def __post_init__(self) -> None:
        if self.on_bad_sample == "raise" and self.on_bad_sample_limit is not None:
            raise ConfigError(
                f"on_bad_sample_limit is {self.on_bad_sample_limit}, but on_bad_sample is 'raise': the first bad sample ends "
                "the run. Set on_bad_sample=skip, or leave the limit out."
            )

    @property
    def limit(self) -> int | None:
        """Different samples that may be skipped; None if none may."""
        return None if self.on_bad_sample == "raise" else self.on_bad_sample_limit or DEFAULT_LIMIT


@dataclass(frozen=True)
class Options:
    """All arguments of a Trainer except its callbacks.

    Attributes:
        config: the resolved config that the Trainer was built from, if any.
    """

    engine: Engine | str
    batch: BatchOptions
    limits: LimitOptions
    evaluation: EvaluationOptions
    numerics: NumericOptions
    samples: SampleOptions
    run_dir: str | None
    seed: int
    fast_dev_run: int
    config: dict[str, Any] | None = None


def read_options(arguments: Mapping[str, Any]) -> Options:
    """Return the Trainer's arguments in groups, with `overfit_batches` and `fast_dev_run` applied.

    Raises:
        ConfigError: two of them contradict each other, or one has no effect.
    """
    given = dict(arguments)
    overfit = given["overfit_batches"]
    if overfit is not None:
        if not overfit or (given["limit_train_batches"], given["limit_val_batches"]) != (None, None):
            why = "nothing would be left" if not overfit else "limit_train_batches or limit_val_batches is set too"
            raise ConfigError(f"trainer.overfit_batches is {overfit}, but {why}. Leave one out (null is for all).")
        given["limit_train_batches"] = given["limit_val_batches"] = overfit
    if quick := int(given["fast_dev_run"]):
        given |= {"max_epochs": 1, "max_steps": None, "num_sanity_val_steps": 0}
        given |= {"val_check_interval": None, "check_val_every_n_epoch": 1}
        given |= {f"limit_{kind}_batches": quick for kind in ("train", "val", "test", "predict")}

    def group(kind: type[_Group]) -> _Group:
        return kind(**{field.name: given[field.name] for field in fields(kind)})  # type: ignore[arg-type]

    return Options(
        given["engine"],
        group(BatchOptions),
        group(LimitOptions),
        group(EvaluationOptions),
        group(NumericOptions),
        group(SampleOptions),
        given["run_dir"],
        given["seed"],
        quick,
    )
