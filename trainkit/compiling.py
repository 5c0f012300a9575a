"""torch.compile for a Task: each module that the Task holds is compiled in place.

In place (`nn.Module.compile`), so that the names of weights stay what they are: no `_orig_mod.` in a checkpoint. The
modules that are the Task's attributes are compiled rather than `training_step`, whose calls of `log` and of hooks are
Python for good reason.

The gradients of a compiled module are there all at once, at the end of its backward, and their sums over ranks begin then. A
model that is held as several modules, or as a ModuleList of its blocks, has them earlier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainkit.errors import ConfigError
from trainkit.task import Task

_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which a GPU replays CUDA graphs


@contextlib.contextmanager
def compiled(task: Task, wish: bool | str) -> Iterator[None]:
    """Compile the task's modules while the context lasts; compiling itself happens at their first call.

    Args:
        task: its direct children with weights are compiled, each as one graph where it can be.
        wish: false for nothing, true for torch.compile's default mode, or the name of a mode.

    Raises:
        ConfigError: the task has no such module.
    """
    if wish is False:
        yield
        return
    modules = list(_called(task))
    if not modules:
        raise ConfigError(
            f"trainer.compile is {wish}, but {type(task).__name__} has no module with weights as an attribute. Put the "
            "model into one (self.model = ...), or leave it out."
        )
    fresh = [m for m in modules if m._compiled_call_impl is None]  # what the user compiled stays as it is
    for module in fresh:
        module.compile(mode=None if wish is True else wish)
        if wish in _WITH_GRAPHS:
            module._compiled_call_impl = _keeping_gradients(module, module._compiled_call_impl)
    try:
        with _room_for(len(fresh)):
            yield
    finally:
        for module in fresh:
            module._compiled_call_impl = None


@contextlib.contextmanager
def _room_for(modules: int) -> Iterator[None]:
    """Let torch compile so many modules, each as often as it would one: what is beyond its limit would run uncompiled.

    Modules that are compiled in place go by one function of torch's, whose compilations it counts together.
    """
    from torch._dynamo import config

    before = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit, config.accumulated_recompile_limit = (limit * max(modules, 1) for limit in before)
    try:
        yield
    finally:
        config.recompile_limit, config.accumulated_recompile_limit = before


def _keeping_gradients(module: nn.Module, call: Any) -> Callable[..., Any]:
    """Return the call of a module that first moves its gradients out of CUDA graphs' memory, where there are any yet.

    A replayed backward writes its gradients where it wrote those before: where a step has several microbatches, torch would
    refuse to add the second one's.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        return call(*args, **kwargs)

    return called


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that have weights; lists and dicts of modules are never called themselves, so theirs."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child
