"""torch.compile for a Task: each module that the Task holds is compiled in place.

In place (`nn.Module.compile`), so that the names of weights stay what they are: no `_orig_mod.` in a checkpoint. The
modules that are the Task's attributes are compiled rather than `training_step`, whose calls of `log` and of hooks are
Python for good reason.

The gradients of a compiled module are there all at once, at the end of its backward, and their sums over ranks begin then. A
model that is held as several modules, or as a ModuleList of its blocks, has them earlier.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from trainkit.api.task import Task
from trainkit.errors import ConfigError

# Let torch count each module's compilations for itself, where it can (2.15): its limit is there against endless ones.
_ALONE: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
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
        module._compiled_call_impl = torch.compile(_traceable(module), mode=None if wish is True else wish, **_ALONE)
        if wish in _WITH_GRAPHS:
            module._compiled_call_impl = _keeping_gradients(module, module._compiled_call_impl)
    try:
        with _room_for(fresh):
            yield
    finally:
        for module in fresh:
            module._compiled_call_impl = None


def _traceable(module: nn.Module) -> Callable[..., Any]:
    """Return what calls a module, for torch.compile.

    torch before 2.15 passes over the frames of its own classes: an nn.Sequential that is compiled in place would run
    uncompiled, without an error. So they are called from a frame of ours, whose code object is this module's alone.
    """
    its: Callable[..., Any] = module._call_impl
    if not type(module).forward.__module__.startswith("torch."):
        return its

    def call(*args: Any, **kwargs: Any) -> Any:
        return its(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


@contextlib.contextmanager
def _room_for(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let torch compile each of these as often as one: what is beyond its limits would run uncompiled, without an error.

    Modules of one class share their code, and torch counts by code.
    """
    from torch._dynamo import config

    before = config.recompile_limit, config.accumulated_recompile_limit
    most = max(Counter(map(type, modules)).values(), default=1)
    config.recompile_limit, config.accumulated_recompile_limit = before[0] * (1 if _ALONE else most), before[1] * most
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
