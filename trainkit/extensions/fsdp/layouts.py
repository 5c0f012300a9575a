"""Layouts: what another extension brings for an option of this engine (engine.pipeline, .context)."""

from __future__ import annotations

from typing import Any

from trainkit.engine.ranks import Ranks
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extension import find, resolve


def refuse_settings(ranks: Ranks, settings: StepSettings) -> None:
    """Refuse what does not go with stages, or with parts of a sequence.

    Raises:
        ConfigError: a callback reads all layers, of which a rank has those of its stage; layers in
            float8 would be split; or modules are compiled, whose attention asks which step is under
            way.
    """
    if ranks.pipeline_size > 1 and "layers" in settings.callbacks:
        raise ConfigError(
            f"engine.pipeline is {ranks.pipeline_size}, and {settings.callbacks['layers']} reads all"
            " layers of the model, of which each rank has those of its stage. Leave it out, or split"
            " the model by engine.tensor and FSDP2 alone (engine.pipeline=1)."
        )
    for option, size in (("tensor", ranks.tensor_size), ("pipeline", ranks.pipeline_size)):
        if size > 1 and settings.precision == "fp8-mixed":
            raise ConfigError(
                f"engine.{option} is {size}, and trainer.precision is 'fp8-mixed': layers in float8"
                f" have not been split so yet. Use trainer.precision=bf16-mixed, or"
                f" engine.{option}=1."
            )
    if ranks.context_size > 1 and "trainer.compile" in settings.used:
        raise ConfigError(
            f"engine.context is {ranks.context_size}, and trainer.compile is set: attention that"
            " gathers the keys of other ranks has not been compiled yet. Set trainer.compile=false,"
            " or engine.context=1."
        )


def layout_of(option: str) -> Any:
    """Return the class that an option names.

    Raises:
        ConfigError: no extension brings it.
    """
    target = find("layouts", option, {})
    if target is None:
        raise ConfigError(
            f"engine.{option} is set, and this copy of trainkit has no extension that brings it."
            " Install all of trainkit."
        )
    return resolve(target)
