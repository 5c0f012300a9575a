"""Activation checkpointing (trainer.activation_checkpointing): blocks keep no activations, and
compute them again in backward.

Chen et al. 2016. It costs one more forward of each block, and saves all that is held inside of it.
Random numbers are drawn again as they were, so that gradients are the same bits; statistics of
batch norm are of the first forward alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.api.view import RunView
from trainkit.engine.blocks import blocks_of
from trainkit.errors import ConfigError
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage

_KEY = "trainer.activation_checkpointing"


def of_stage(stage: Stage) -> Recompute | None:
    """Return the feature if it is asked for."""
    blocks = stage.options.numerics.activation_checkpointing
    return Recompute(blocks, stage.enter) if blocks else None


class Recompute(Feature):
    """See the module.

    Args:
        enter: enters a context until the stage ends.
    """

    name = _KEY

    def __init__(
        self,
        blocks: bool | Sequence[str],
        enter: Callable[[contextlib.AbstractContextManager[None]], None],
    ) -> None:
        self._blocks = blocks
        self._enter = enter

    def model_made(self, run: RunView) -> None:
        """Let the blocks compute again; after they are compiled."""
        self._enter(recomputed(run.task, self._blocks))


@contextlib.contextmanager
def recomputed(task: nn.Module, blocks: bool | Sequence[str]) -> Iterator[None]:
    """Within the context the task's blocks compute their activations again in backward. Names of
    weights do not change.

    Args:
        blocks: true for repeated blocks, or names of modules or of their classes; false for none.

    Raises:
        ConfigError: there are no such blocks.
    """
    if blocks is False:
        yield
        return
    modules = blocks_of(task, None if blocks is True else list(blocks), _KEY)
    if not modules:
        raise ConfigError(
            f"{_KEY} is true, and {type(task).__name__} has no repeated blocks: several modules of"
            f" one class in a list. Name modules or classes: {_KEY}=[Block]."
        )
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        # in place: a wrapper would change the names of weights
        module.forward = functools.partial(_run, module.forward, _norms_of(module))
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own


def _run(forward: Callable[..., Any], norms: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if norms and not torch.compiler.is_compiling():
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _Copies(norms))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _norms_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose statistics each forward changes."""
    return [inner for inner in module.modules() if getattr(inner, "track_running_stats", False)]


class _Copies(contextlib.AbstractContextManager[None]):
    """A context in which copies of the layers' statistics change, in place of their own. torch
    makes one for a forward, and enters it in each backward through the forward's graph.
    """

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._norms = norms
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for norm in self._norms:
                own = dict(norm._buffers)
                stack.callback(norm._buffers.update, own)
                for name, buffer in own.items():
                    if buffer is not None:
                        norm._buffers[name] = buffer.clone()
            self._entered.append(stack.pop_all())

    def __exit__(self, *failure: object) -> None:
        self._entered.pop().close()
