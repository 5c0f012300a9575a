"""Calls hooks: of the callbacks and the Task, in the order of api/callback.py's in_order. Only
overridden hooks cost anything.

After the Task come the callbacks that monitor values, since hooks may log, and then those that
save: a checkpoint must contain the changes of all others. The values that a hook of an epoch or of
the whole run logs are combined right after the Task's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from trainkit.api.callback import Callback, follows_task, in_order
from trainkit.api.task import Task
from trainkit.api.task_hooks import TASK_HOOKS
from trainkit.api.view import RunView
from trainkit.errors import ConfigError, TaskError, did_you_mean
from trainkit.extension import advice
from trainkit.metrics.hook_log import HookLog

# Hooks of an epoch or of a whole run: what they log is combined over the ranks, which all call
# them.
_SPANS = ("fit", "sanity_check", "train", "train_epoch")
_EVALUATIONS = ("validation", "test", "predict", "validation_epoch", "test_epoch", "predict_epoch")
_LOGGED = {f"on_{what}_{end}" for what in (*_SPANS, *_EVALUATIONS) for end in ("start", "end")}


# of a call: its owner's class, the hook, what to call
Around = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]


class Hooks:
    """A table from a hook's name to the methods that implement it."""

    def __init__(
        self,
        trainer: RunView,
        task: Task,
        callbacks: Sequence[Callback],
        log: HookLog | None = None,
    ) -> None:
        """Collect the overridden hooks; `log` takes the values that they log.

        Raises:
            ConfigError: a callback has a method that looks like a hook and is none.
            TaskError: the Task has one.
        """
        names = [n for n, f in vars(Callback).items() if callable(f) and not n.startswith("_")]
        for callback in callbacks:
            if stray := _stray_hook(type(callback), names):
                raise ConfigError(_no_hook(type(callback), stray, "Callback", names))
        _check_task(task, names)
        self.log = log or HookLog(lambda value: [value], lambda values: None)
        for callback in callbacks:
            callback._task = task
        self._trainer = trainer
        self._task = task
        self._names = names
        self._owners: list[Task | Callback] = [task, *callbacks]
        self._callbacks = [
            c for c in in_order(callbacks) if not c.needs_several_ranks or trainer.world_size > 1
        ]
        self._around: Around | None = None
        self._collect()

    @contextlib.contextmanager
    def fixed(self) -> Iterator[None]:
        """Collect the hooks again, since setup() may have set some on an instance;
        within the context that is an error.
        """
        self._collect()
        for owner in self._owners:
            owner._fix_hooks(True)
        try:
            yield
        finally:
            for owner in self._owners:
                owner._fix_hooks(False)

    def _collect(self) -> None:
        trainer, task = self._trainer, self._task
        self._table: dict[str, list[Callable[..., Any]]] = {}
        for name in self._names:
            before: list[Callable[..., Any]] = []
            after: list[Callable[..., Any]] = []
            for callback in self._callbacks:
                if _overrides(callback, Callback, name):
                    _check_arguments(callback, Callback, name)
                    method = functools.partial(
                        _fitting(getattr(callback, name), name, 2), trainer, task
                    )
                    (after if follows_task(callback) else before).append(method)
            if name in TASK_HOOKS and _overrides(task, Task, name):
                _check_arguments(task, Task, name)
                before.append(_fitting(getattr(task, name), name, 0))
            if name in _LOGGED:
                before.append(self.log.flush)
            if before or after:
                self._table[name] = [*before, *after]
        self._calls = self._table
        if self._around is not None:
            self.wrap(self._around)

    def wrap(self, around: Around) -> None:
        """Wrap each call from now on; replaces an earlier wrapper.

        Args:
            around: receives the owner's class name, the hook's name and its implementation; returns
                the function to call.
        """
        self._around = around
        self._calls = {
            name: [
                around(owner, name, method)
                for owner, method in zip(self.owners(name), methods, strict=True)
            ]
            for name, methods in self._table.items()
        }

    def owners(self, name: str) -> list[str]:
        """Return the class names of the objects that implement the hook `name`,
        in order of the calls.
        """
        methods = (
            getattr(implementation, "func", implementation)
            for implementation in self._table.get(name, ())
        )
        return [type(getattr(method, "__self__", method)).__name__ for method in methods]

    def __call__(self, name: str, *args: Any) -> None:
        """Call the hook `name`."""
        for implementation in self._calls.get(name, ()):
            implementation(*args)

    def has(self, name: str) -> bool:
        """Return whether anything implements the hook `name`."""
        return name in self._table

    def ends_epoch(self, name: str, *args: Any) -> bool:
        """Call the hook `name`; return whether one returned -1."""
        ends = False
        for implementation in self._calls.get(name, ()):
            result = implementation(*args)
            ends = ends or (isinstance(result, int) and result == -1)
        return ends

    def of_task(self, name: str, *args: Any) -> None:
        """Call the hook `name` of the Task only."""
        for method, implementation in zip(
            self._table.get(name, ()), self._calls.get(name, ()), strict=True
        ):
            if not isinstance(method, functools.partial):
                implementation(*args)

    def of_callbacks(self, name: str, *args: Any) -> None:
        """Call the hook `name` of the callbacks only."""
        for method, implementation in zip(
            self._table.get(name, ()), self._calls.get(name, ()), strict=True
        ):
            if isinstance(method, functools.partial):
                implementation(*args)


def _overrides(owner: object, base: type, name: str) -> bool:
    """Return whether an object has a hook of its own, by its class or set on the instance."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _check_arguments(owner: Task | Callback, base: type, name: str) -> None:
    """Refuse a hook that cannot take what it is called with: the last one is called after hours."""
    if not name.startswith(("on_", "setup", "teardown")):
        return
    signature = inspect.signature(getattr(owner, name))
    given = [*inspect.signature(getattr(base, name)).parameters][1:]
    count = len(given) - given[-1:].count("dataloader_idx")  # see _fitting
    for arguments in (given, given[:count]):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return
    error = ConfigError if base is Callback else TaskError
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    raise error(
        f"{type(owner).__name__}.{name}{shown} is called with"
        f" ({', '.join(given)}), which it does not take."
    )


def _fitting(method: Callable[..., Any], name: str, before: int) -> Callable[..., Any]:
    """Return the hook of an evaluation's batch as one that takes `dataloader_idx`, though the
    user's may leave it out.

    Args:
        before: arguments that come before the batch's.
    """
    if not name.endswith(("_batch_start", "_batch_end")) or name.startswith("on_train"):
        return method
    count = before + (2 if name.endswith("_start") else 3)
    parameters = inspect.signature(method).parameters
    if len(parameters) != count or any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()
    ):
        return method

    @functools.wraps(method)
    def without_index(self: object, *args: Any) -> Any:
        return method(*args[:count])

    return types.MethodType(without_index, getattr(method, "__self__"))  # noqa: B009 - a bound method, to the type checker too


def _check_task(task: Task, of_callbacks: Collection[str]) -> None:
    """Refuse methods that would silently never be called:
    unknown hooks, and hooks that only Lightning has.
    """
    own = type(task)
    for name in sorted({*dir(own)} - {*dir(Task)}):
        if callable(getattr(own, name)) and (text := advice("a method of a Task", name)):
            raise TaskError(
                f"{own.__name__}.{name}() is a hook of Lightning, and none here: it would never be"
                f" called{text}"
            )
    if stray := _stray_hook(
        own, TASK_HOOKS | {"on_before_batch_transfer", "on_after_batch_transfer"}
    ):
        where = " A Callback has it: Trainer(callbacks=[...])." if stray in of_callbacks else ""
        raise TaskError(_no_hook(own, stray, "Task", TASK_HOOKS) + where)


def _stray_hook(cls: type, known: Collection[str]) -> str | None:
    """Return the name of a method that looks like a hook and is none, or None."""
    return next(
        (
            n
            for n in dir(cls)
            if n.startswith("on_")
            and n not in known
            and callable(getattr(cls, n))
            and not _calls(cls, n)
        ),
        None,
    )


_FRAMEWORKS = ("trainkit", "torch", "builtins")


def _calls(cls: type, name: str) -> bool:
    """Return whether another method of a class speaks of the method: it is a helper then."""
    own = [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in _FRAMEWORKS]
    others = [member for each in own for n, member in vars(each).items() if n != name]
    return any(name in code.co_names for member in others for code in _codes(member))


def _codes(member: object) -> Iterator[types.CodeType]:
    """Yield the code of a method, or of the one in a decorator, and of functions within it."""
    member = getattr(member, "__func__", getattr(member, "fget", member))
    code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
    todo = [code] if isinstance(code, types.CodeType) else []
    while todo:
        code = todo.pop()
        yield code
        todo += [part for part in code.co_consts if isinstance(part, types.CodeType)]


def _no_hook(cls: type, name: str, kind: str, known: Collection[str]) -> str:
    return (
        f"{cls.__name__}.{name}() is no hook of a {kind}: it would never be called"
        f"{advice(kind, name) or '.' + did_you_mean(name, known)}"
    )
