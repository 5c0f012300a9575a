"""What the modules of a microbatch return, as sketches.

Shapes          of whole tensors: noted in one process, looked up on ranks
MicrobatchWatch a microbatch, from its first module to the end of its backward
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.shards import whole_of
from trainkit.device.sync_guard import allowed_read
from trainkit.device.transfer import count_samples
from trainkit.extensions.audit.values import outputs_of_modules
from trainkit.extensions.capsule.batches import tensors_in
from trainkit.extensions.check_engine.sketch import Place, place, sketch
from trainkit.extensions.check_engine.without_dropout import WithoutDropout
from trainkit.extensions.check_resume.recorder import digests
from trainkit.extensions.pipeline.placeholder import Placeholder

_WIDTH = 512  # numbers of a sample's output


class Shapes:
    """See the module.

    Args:
        known: name -> shapes in one process; None: this is it.
        index: of the rank in its tensor group, or its context group.
        parts: ranks of the group.
        of_tokens: whether it is a context group.
    """

    def __init__(
        self, known: Mapping[str, Any] | None, index: int, parts: int, of_tokens: bool = False
    ) -> None:
        self._notes = known is None
        self._shapes = {name: {tuple(own) for own in each} for name, each in (known or {}).items()}
        self._index = index
        self._parts = parts
        self.of_tokens = of_tokens

    def place(self, name: str, shape: tuple[int, ...]) -> Place | None:
        """Return where a tensor of this rank is in the whole one; None if it is not a part of it."""
        if self._notes:
            self._shapes.setdefault(name, set()).add(shape)
            return Place(shape)
        wholes = self._shapes.get(name, ())
        return place(shape, wholes, self._index, self._parts, self.of_tokens)

    def noted(self) -> dict[str, list[tuple[int, ...]]]:
        """Return name -> shapes."""
        return {name: sorted(own) for name, own in self._shapes.items()}


class MicrobatchWatch:
    """Records a microbatch.

    Args:
        batch: as the Task gets it.
        shapes: of outputs.

    Attributes:
        record: samples, their number, sketches of outputs by module, names of outputs of which this
            rank has a part, modules that draw random numbers, those that are skipped, and the loss.
        has_dropped: whether a function of dropout would have dropped something.
    """

    def __init__(self, batch: Any, shapes: Shapes) -> None:
        with allowed_read():
            samples = digests(batch)
        self.record: dict[str, Any] = {
            "samples": samples,
            "size": count_samples(batch),
            "outputs": {},
            "parts": [],
            "draws": {},
            "skipped": {},
            "loss": None,
        }
        self._shapes = shapes
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._is_own = False
        self._has_ended = False
        self._opened = contextlib.ExitStack()
        self._without = WithoutDropout(self._drawn)

    def open(self, task: nn.Module) -> None:
        """Watch the modules of a Task from now on, with dropout off."""
        self._calls.clear()
        self._opened.enter_context(self._without)
        self._opened.enter_context(outputs_of_modules(task, self._output, self._inside.append))

    def end_forward(self, loss: Tensor) -> None:
        """Record the loss."""
        self._has_ended = True
        with allowed_read():
            self.record["loss"] = float(loss.detach())

    def close(self) -> None:
        """Watch nothing any more."""
        self._opened.close()

    @property
    def has_dropped(self) -> bool:
        """See the class."""
        return self._without.calls > 0

    def _drawn(self, function: str) -> None:
        if self._is_in_forward and not self._is_own:
            inside = self._inside[-1] if self._inside else ""
            self.record["draws"].setdefault(inside, function)

    def _output(self, name: str, output: Any) -> None:
        if self._inside and self._inside[-1] == name:
            self._inside.pop()
        if not self._is_in_forward:
            return
        self._calls[name] += 1
        called = name if self._calls[name] == 1 else f"{name} (call {self._calls[name]})"
        tensors = tensors_in(output, called)
        if not tensors:
            self.record["skipped"][called] = f"returns a {type(output).__name__}"
        for key, tensor in tensors:
            if type(tensor) is Placeholder:  # of an earlier pipeline stage, which records it
                continue
            with self._own_work():
                self._add(key, whole_of(tensor))

    @property
    def _is_in_forward(self) -> bool:
        """Whether the modules that run are those of the forward, and not of a backward, which
        computes some again: of this microbatch, or in a pipeline of an earlier one.
        """
        return not self._has_ended and torch._C._current_graph_task_id() == -1

    def _add(self, key: str, own: Tensor) -> None:
        size = self.record["size"]
        rows = size if own.dim() and size and own.shape[0] % size == 0 else 1
        if self._shapes.of_tokens and own.shape[:1] != (size,):
            self.record["skipped"][key] = "its rows are tokens of a rank"
            return
        # a part is one along another dimension than that of samples
        at = self._shapes.place(f"output {key}", tuple(own.shape[1:]))
        if at is None or not own.numel():
            self.record["skipped"][key] = f"its shape is {list(own.shape)}"
            return
        if at.dim >= 0:
            self.record["parts"].append(key)
            at = Place((own.shape[0], *at.shape), at.dim + 1, at.offset, at.late)
        self.record["outputs"][key] = sketch(own, at, rows, _WIDTH)

    @contextlib.contextmanager
    def _own_work(self) -> Iterator[None]:
        """Within the context, nothing is noted as the model's."""
        self._is_own = True
        try:
            with allowed_read():
                yield
        finally:
            self._is_own = False
