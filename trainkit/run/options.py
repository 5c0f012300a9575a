"""What a Trainer was told, in one frozen object that a Session reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainkit.device.precision import PrecisionName
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import Scaling

NO_END = "None of trainer.max_epochs, trainer.max_steps and trainer.max_time is set: training would never end. Set one of them."


@dataclass(frozen=True)
class Settings:
    """What the Trainer was told, as its constructor documents it."""

    engine: Engine | str
    limits: Limits
    pad: bool
    train_limit: float | None
    val_limit: float | None
    test_limit: float | None
    predict_limit: float | None
    global_batch_size: int | None
    accumulate: int | dict[int, int] | None
    lr_scaling: Scaling
    lr_reference_batch_size: int | None
    lr_warmup_steps: int | None
    lr_warmup_epochs: float | None
    lr_momentum_correction: bool
    precision: PrecisionName
    channels_last: bool | Literal["auto"]
    compile: bool | str
    sync_batchnorm: bool
    halve_batch_on_oom: bool
    overfit: bool
    num_sanity_val_steps: int
    deterministic: bool
    benchmark: bool
    detect_anomaly: bool
    stop_on_nonfinite: bool
    assert_no_sync: bool
    run_dir: str | None
    seed: int

    def __post_init__(self) -> None:
        """Refuse what would pass without an effect."""
        reference, algorithm = self.lr_reference_batch_size, self.limits.gradient_clip_algorithm
        if self.lr_scaling == "none" and reference is not None:
            raise ConfigError(
                f"trainer.lr_reference_batch_size is {reference}, but trainer.lr_scaling is 'none': rates are not scaled, so "
                "that it has no effect. Leave it out, or use trainer.lr_scaling=linear or sqrt."
            )
        if self.limits.gradient_clip_val is None and algorithm != "norm":
            raise ConfigError(
                f"trainer.gradient_clip_algorithm is '{algorithm}', but trainer.gradient_clip_val is not set: nothing is "
                "clipped. Set trainer.gradient_clip_val, or leave the algorithm out."
            )


@dataclass(frozen=True)
class Limits:
    """When training ends and how often things happen.

    Attributes:
        max_epochs: passes over the data, or None.
        max_steps: optimizer steps, or None.
        log_every_n_steps: steps between two logs of step values.
        val_check_interval: steps between two validations inside an epoch, or None for the epoch's end.
        check_val_every_n_epoch: epochs between two validations.
        gradient_clip_val: see optim/clipping.py; None for no clipping.
        gradient_clip_algorithm: "norm" or "value".
    """

    max_epochs: int | None
    max_steps: int | None
    log_every_n_steps: int = 50
    val_check_interval: int | None = None
    check_val_every_n_epoch: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
