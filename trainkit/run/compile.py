"""torch.compile for a Task: compiles each module of the Task in place.

In place (`nn.Module.compile`) the names of weights do not change: no `_orig_mod.` in a checkpoint.
The Task's modules are compiled rather than `training_step`, which calls `log` and hooks and so must
stay Python.

The gradients of a compiled module are ready all at once, at the end of its backward; their sums
over ranks start then. A model held as several modules, or as a ModuleList of its blocks, has them
earlier; so does any model with mode "blocks", which compiles its repeated blocks alone (a
transformer's layers), and those of one class once for all.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from trainkit.api.view import RunView
from trainkit.engine.blocks import repeated_blocks
from trainkit.errors import ConfigError
from trainkit.run.feature import Feature

# Let torch (from 2.15) count the compilations of each module separately: its limit stops endless
# recompilation.
_ALONE: dict[str, Any] = (
    {"isolate_recompiles": True}
    if "isolate_recompiles" in signature(torch.compile).parameters
    else {}
)
_BLOCKS = "blocks"  # torch's default mode, for repeated blocks
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which a GPU replays CUDA graphs


class Compile(Feature):
    """trainer.compile: the Task's modules are compiled as long as the stage lasts; in an elastic
    job, as long as the process.

    Args:
        enter: enters that context.
    """

    name = "trainer.compile"

    def __init__(
        self, mode: bool | str, enter: Callable[[contextlib.AbstractContextManager[None]], None]
    ) -> None:
        self._mode = mode
        self._enter = enter

    def model_made(self, run: RunView) -> None:
        """Compile the modules at their first call."""
        in_blocks = run.engine.ranks.pipeline_size > 1  # stages cut what holds them
        self._enter(compiled(run.task, self._mode, in_blocks))

    def data_read(self, run: RunView) -> None:
        """Refuse CUDA graphs on other accelerators, and trainer.assert_no_sync beside CUDA."""
        kind = run.engine.device.type
        if kind in ("xpu", "mps") and uses_graphs(self._mode):
            raise ConfigError(
                f"trainer.compile is '{self._mode}', which replays CUDA graphs, and engine.device is"
                f" '{kind}'. Use trainer.compile=true."
            )
        if run.options.numerics.assert_no_sync and kind != "cuda":
            raise ConfigError(
                f"trainer.assert_no_sync and trainer.compile are both set: on '{kind}' the guard's"
                " interception of calls prevents torch.compile from compiling. Check without"
                " compile."
            )


def uses_graphs(mode: bool | str) -> bool:
    """Return whether a GPU replays CUDA graphs in this mode."""
    return mode in _WITH_GRAPHS


@contextlib.contextmanager
def compiled(task: nn.Module, mode: bool | str, in_blocks: bool = False) -> Iterator[None]:
    """Compile the task's modules while the context lasts; compiling itself happens at their first
    call.

    Args:
        task: its direct children with weights are compiled, each as one graph if possible.
        mode: false for nothing, true or "blocks" for torch.compile's default mode, or the name of a
            mode.
        in_blocks: compile its repeated blocks in place of its children.

    Raises:
        ConfigError: the task has no such module.
    """
    if mode is False:
        yield
        return
    in_blocks = in_blocks or mode == _BLOCKS
    modules = list(repeated_blocks(task) if in_blocks else _called(task))
    if not modules and in_blocks:
        raise ConfigError(
            f"trainer.compile is {mode}, but {type(task).__name__} has no list of several modules of"
            " one class (nn.ModuleList of a transformer's layers). Use trainer.compile=true."
        )
    if not modules:
        raise ConfigError(
            f"trainer.compile is {mode}, but {type(task).__name__} has no module with weights as an"
            " attribute. Put the model into one (self.model = ...), or leave it out."
        )
    alone = {} if in_blocks else _ALONE  # blocks of one class share what is compiled
    # not those that the user compiled
    fresh = [m for m in modules if m._compiled_call_impl is None]
    own = None if mode is True or mode == _BLOCKS else mode
    for module in fresh:
        module._compiled_call_impl = torch.compile(_traceable(module), mode=own, **alone)
    try:
        with (
            _room_for(fresh, bool(alone)),
            _graphs(task) if uses_graphs(mode) else contextlib.nullcontext(),
        ):
            yield
    finally:
        for module in fresh:
            module._compiled_call_impl = None


def _traceable(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module, for torch.compile.

    torch before 2.15 skips the frames of its own classes: an nn.Sequential compiled in place would
    run uncompiled, without an error. So it is called from a frame of ours, with a code object for
    this module only.
    """
    its: Callable[..., Any] = module._call_impl
    if not type(module).forward.__module__.startswith("torch."):
        return its

    def call(*args: Any, **kwargs: Any) -> Any:
        return its(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


@contextlib.contextmanager
def _room_for(modules: Sequence[nn.Module], alone: bool) -> Iterator[None]:
    """Let torch compile each of these as often as one: beyond its limits a module would run
    uncompiled, without an error.

    Modules of one class share their code, and torch counts by code.
    """
    from torch._dynamo import config

    before = config.recompile_limit, config.accumulated_recompile_limit
    most = max(Counter(map(type, modules)).values(), default=1)
    config.recompile_limit = before[0] * (1 if alone else most)
    config.accumulated_recompile_limit = before[1] * most
    try:
        yield
    finally:
        config.recompile_limit, config.accumulated_recompile_limit = before


class _GraphsOf:
    """Called before each step of a Task whose modules replay CUDA graphs.

    A replay writes to the memory of the one before it. torch must know which outputs are still
    read, and guesses: a call after a backward, or without gradients, begins something new, and all
    that earlier calls returned is dead. Of several modules the guess is wrong: the head's input,
    which the encoder has just returned, or its gradients, to which the next microbatch adds. So
    torch is shown where a step begins, and gradients leave that memory first.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task

    def __call__(self) -> None:
        """Begin a step."""
        for parameter in self._task.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _graphs(task: nn.Module) -> Iterator[None]:
    """Show torch each step of the Task while the context lasts, and let it guess again after it."""
    vars(task)["_before_step"] = _GraphsOf(task)
    try:
        yield
    finally:
        vars(task)["_before_step"] = None
        # once it was shown a step it waits to be shown the next; graphs of the user's own have none
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None and hasattr(trees, "MarkStepBox"):
            trees.MarkStepBox.mark_step_counter = 0


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that have weights;
    of lists and dicts of modules, which are never called, their children.
    """
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child
