"""Layouts: what another extension brings for an option of this engine (engine.pipeline, .context)."""

from __future__ import annotations

from typing import Any

from trainkit.engine.ranks import Ranks
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extension import find, resolve

STAGE = "_pipeline_place"  # an attribute of a layer that is cut into stages
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")


def refuse_settings(ranks: Ranks, settings: StepSettings) -> None:
    """Refuse what does not go with stages, or with parts of a sequence.

    Raises:
        ConfigError: a callback reads all layers, of which a rank has those of its stage; the Task
            clips gradients, of which it has those; layers in float8 would be split; or modules are
            compiled, whose attention asks which step is under way.
    """
    if ranks.pipeline_size > 1 and "configure_gradient_clipping" in settings.used:
        raise ConfigError(
            f"engine.pipeline is {ranks.pipeline_size}, and the Task defines"
            " configure_gradient_clipping, where each rank has the gradients of its stage alone. Set"
            " trainer.gradient_clip_val, whose norm is that of all stages."
        )
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


def refuse_schedule(pipeline: int, name: str, chunks: int | None) -> None:
    """Refuse an unknown schedule, one without stages, and chunks that it does not take.

    Args:
        pipeline, name, chunks: engine.pipeline, .pipeline_schedule and .pipeline_chunks.

    Raises:
        ConfigError: they do not go together.
    """
    if name == "zero_bubble":
        raise ConfigError(
            "engine.pipeline_schedule=zero_bubble is not there: torch has the gradients of inputs"
            " apart from those of weights in private functions alone, and by public ones a backward"
            " computes the former twice, which costs more than the waiting it saves. Set"
            " engine.pipeline_schedule=interleaved_1f1b, whose ranks wait less than those of 1f1b."
        )
    if name not in SCHEDULES:
        raise ConfigError(
            f"engine.pipeline_schedule is '{name}'; it must be one of {', '.join(SCHEDULES)}."
        )
    given = {"pipeline_schedule": (name, "1f1b"), "pipeline_chunks": (chunks, None)}
    for option, (own, default) in given.items():
        if own != default and pipeline == 1:
            raise ConfigError(
                f"engine.{option} is '{own}', and engine.pipeline is 1: there are no stages to"
                " schedule. Set engine.pipeline=2, say."
            )
    if name != "interleaved_1f1b" and (chunks or 1) > 1:
        raise ConfigError(
            f"engine.pipeline_chunks is {chunks}, and engine.pipeline_schedule is '{name}', which"
            " has one stage on each rank. Set engine.pipeline_schedule=interleaved_1f1b."
        )
    if name == "interleaved_1f1b" and chunks == 1:
        raise ConfigError(
            "engine.pipeline_chunks is 1, and engine.pipeline_schedule is 'interleaved_1f1b', which"
            " takes several stages of each rank in turn. Set engine.pipeline_chunks=2, or"
            " engine.pipeline_schedule=1f1b for one."
        )


def refuse_gathering(reshard: bool) -> None:
    """Refuse to gather a stage that one rank has alone for each microbatch.

    Raises:
        ConfigError: engine.reshard_after_forward is true.
    """
    if reshard:
        raise ConfigError(
            "engine.reshard_after_forward is true, and each pipeline stage is on one rank alone,"
            " which gathers nothing: it has no effect. Leave it out, or start more ranks."
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


def check_groups(
    ranks: int, replicas: int, tensor: int, pipeline: int = 1, context: int = 1
) -> None:
    """Check that groups of ranks (engine.replicas, .tensor, .pipeline, .context) come out even.

    Raises:
        ConfigError: they do not.
    """
    product = replicas * tensor * pipeline * context
    if ranks % product:
        given = {
            "engine.replicas": replicas,
            "engine.tensor": tensor,
            "engine.pipeline": pipeline,
            "engine.context": context,
        }
        shown = [f"{key} is {value}" for key, value in given.items() if value > 1]
        what = f"their product, {product}," if len(shown) > 1 else "it"
        raise ConfigError(
            f"{' and '.join(shown)}, and there are {ranks} ranks; {what} must divide them."
        )
