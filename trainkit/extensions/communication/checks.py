"""What approximate communication excludes: each is refused before training, with what to do.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.arguments import show
from trainkit.engine.step_settings import Communication, Need, StepSettings
from trainkit.errors import ConfigError
from trainkit.extensions.communication.settings import Alone

_ENGINES = ("single", "horovod", "ddp")
_EXACT = "or use communication=exact."
_FOR_BOTH = {
    "manual_optimization": (
        "the Task updates its weights itself (automatic_optimization=False), and the engine cannot"
        f" know which of its updates is a step. Let the trainer optimize, {_EXACT}"
    ),
    "trainer.halve_batch_on_oom": (
        "trainer.halve_batch_on_oom is true: a step that is taken again would count twice in what"
        f" is held back. Leave it out and lower data.batch_size, {_EXACT}"
    ),
}
# What a callback needs, and ranks that step alone lack -> why.
_NEEDS: dict[Need, str] = {
    "equal_weights": (
        "averages or compares the weights of each step, which are not the same on all ranks"
    ),
    "optimizer_groups": "adds weights while the ranks' differ",
}


def check_communication(
    chosen: Communication, engine: str, options: Mapping[str, Any], settings: StepSettings
) -> None:
    """Refuse settings of a fit that do not go with a kind of communication.

    Args:
        engine: its name.
        options: those of the engine that are not its defaults.

    Raises:
        ConfigError: there is one.
    """
    reasons = (
        _of_local_steps(chosen, options, settings)
        if isinstance(chosen, Alone)
        else _of_powersgd(options, settings)
    )
    for reason in (*_of_both(engine, settings), *reasons):
        raise ConfigError(f"communication is '{chosen.name}', and {reason}")


def _of_both(engine: str, settings: StepSettings) -> Iterator[str]:
    if engine not in _ENGINES:
        yield (
            f"engine is {engine}: its ranks hold parts of the training state and sum gradients in"
            f" parts. Use engine=horovod or engine=ddp, {_EXACT}"
        )
    yield from (_FOR_BOTH[name] for name in sorted(settings.used & _FOR_BOTH.keys()))
    if settings.precision == "16-mixed":
        yield (
            "trainer.precision is '16-mixed', whose loss scale changes while gradients or weights"
            f" of several steps are held back. Use trainer.precision=bf16-mixed, {_EXACT}"
        )


def _of_powersgd(options: Mapping[str, Any], settings: StepSettings) -> Iterator[str]:
    if "compression" in options:
        yield (
            f"engine.compression is {show(options['compression'])}: the factors travel in float32,"
            " since rounding would count in what is held back. Leave one of the two out."
        )
    if options.get("op") == "adasum":
        yield (
            "engine.op is 'adasum', which is no sum: factors of gradients cannot be combined by it."
            " Use engine.op=average."
        )
    if "gradient_predivide_factor" in options:
        yield (
            f"engine.gradient_predivide_factor is {options['gradient_predivide_factor']}, which"
            " keeps float16 in range: the factors travel in float32, so it has no effect. Leave it"
            " out."
        )
    if "elastic" in settings.used:
        yield (
            "the job is elastic: what a lost rank held back would be lost with it, unseen. Use"
            " communication=diloco or local_sgd, whose ranks continue from the last outer step; or"
            " start without --min-np, and resume from checkpoints (resume=auto), which hold what"
            " each rank held back."
        )


def _of_local_steps(
    chosen: Alone, options: Mapping[str, Any], settings: StepSettings
) -> Iterator[str]:
    if "op" in options:
        yield (
            f"engine.op is {show(options['op'])}, but ranks step by the mean over their own"
            " samples. Use engine.op=average."
        )
    if options and not chosen.start_after_steps:
        option, value = next(iter(options.items()))
        yield (
            f"engine.{option} is {show(value)}, which is about sums of gradients, and there are"
            " none (communication.start_after_steps is 0). Leave it out."
        )
    for need, why in _NEEDS.items():
        if need in settings.callbacks:
            yield f"the callback {settings.callbacks[need]} {why}. Leave it out, {_EXACT}"
