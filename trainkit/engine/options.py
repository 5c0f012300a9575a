"""Engine options: why an engine lacks one that another has, and which of Horovod's exclude each
other. Imports no torch.

Which options an engine has is stated by its constructor alone. The table below only holds the
reasons that the other engines print; a test compares it with the constructors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit import extension
from trainkit.errors import ConfigError

_ALONE = "one process has no gradients to sum with other ranks"
_NO_THREAD = (
    "torch.distributed has no background thread that fuses tensors; its buckets are set by"
    " engine.bucket_cap_mb"
)
_BUCKETS = "gradients are summed in buckets there; set their size with engine.bucket_cap_mb"

# option -> engine that lacks it -> why, and what to do.
_LACKING: dict[str, dict[str, str]] = {
    "compression": {"single": _ALONE},
    "op": {"single": _ALONE},
    "gradient_predivide_factor": {"single": _ALONE},
    "num_groups": {"single": _ALONE, "ddp": _BUCKETS},
    "groups": {"single": _ALONE, "ddp": _BUCKETS},
    "sparse_as_dense": {"single": _ALONE},
    "process_set": {"single": "one process has no others to choose from"},
    "fusion_threshold_mb": {"single": _ALONE, "ddp": _NO_THREAD},
    "cycle_time_ms": {"single": _ALONE, "ddp": _NO_THREAD},
    "cache_capacity": {"single": _ALONE, "ddp": _NO_THREAD},
    "autotune": {"single": _ALONE, "ddp": _NO_THREAD},
    "autotune_log_file": {"single": _ALONE, "ddp": _NO_THREAD},
    "bucket_cap_mb": {
        "single": _ALONE,
        "horovod": (
            "Horovod fuses what is ready, up to engine.fusion_threshold_mb; engine.num_groups makes"
            " fixed groups"
        ),
    },
}


def refusals(engine: str, by_launcher: bool = False) -> dict[str, str]:
    """Return the message for each option that an engine lacks.

    Args:
        engine: its name.
        by_launcher: whether the launcher chose it (engine=auto).
    """
    which = f"this launcher's engine is '{engine}'" if by_launcher else f"the engine is '{engine}'"
    reasons = {
        option: by_engine[engine] for option, by_engine in _LACKING.items() if engine in by_engine
    }
    for name, entry in extension.engines():  # at the import of an engine: nothing is refused here
        other = dict.fromkeys(entry.options, entry.elsewhere or f"it is an option of engine={name}")
        reasons |= dict(entry.lacking) if name == engine else other
    return {
        option: f"{which}, where it has no effect: {why}. Leave it out here."
        for option, why in reasons.items()
    }


def changed(**given: Any) -> dict[str, Any]:
    """Return those of the options of how gradients travel that are not the defaults."""
    defaults = {"compression": "none", "op": "average", "gradient_predivide_factor": 1.0}
    defaults |= {"bucket_cap_mb": 25.0, "num_groups": None, "groups": None}
    return {
        option: value for option, value in given.items() if value != defaults.get(option, False)
    }


@dataclass(frozen=True)
class HorovodSums:
    """How Horovod sums gradients; see HorovodEngine for what each means."""

    compression: str
    op: str
    predivide: float
    num_groups: int | None
    groups: list[list[str]] | None
    process_set: list[int] | None

    def __post_init__(self) -> None:
        """Refuse values that Horovod cannot serve, and values that exclude each other."""
        if self.compression == "bf16":
            raise ConfigError(
                "engine.compression is 'bf16', but Horovod 0.28 cannot sum bfloat16: it would"
                " travel as float32 and save nothing. Use engine.compression=fp16, or engine=ddp"
                " under torchrun."
            )
        if self.num_groups is not None and self.groups is not None:
            raise ConfigError(
                f"engine.num_groups is {self.num_groups}, and engine.groups is given too. Set only"
                " one of the two."
            )
        if self.op == "adasum" and self.predivide != 1.0:
            raise ConfigError(
                f"engine.gradient_predivide_factor is {self.predivide}, but engine.op is 'adasum',"
                " which takes every scale out of its result: it has no effect there. Leave it out."
            )
        if self.op == "adasum" and self.process_set is not None:
            raise ConfigError(
                f"engine.process_set is {self.process_set}, but engine.op is 'adasum', which"
                " Horovod computes over all ranks only. Leave one of the two out."
            )
