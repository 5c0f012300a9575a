"""Repeated: a step that a rank runs once for each of its stages must count once.

All passes but the last log nothing, and count nothing in metric objects. A step that writes to its
batch, or to a buffer of the Task outside of layers, would do it again in each pass: it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.errors import TaskError
from trainkit.run.evaluator import uncounted


class Repeated:
    """The steps of a Task.

    Args:
        layers: that one stage alone computes.
    """

    def __init__(self, task: Any, layers: Sequence[nn.Module]) -> None:
        self._task = task
        inside = {id(buffer) for layer in layers for buffer in layer.buffers()}
        self._buffers = [
            (f"'{name}'", buffer)
            for name, buffer in task.named_buffers()
            if id(buffer) not in inside
        ]

    @contextlib.contextmanager
    def one_of_several(
        self, name: str, args: Any, kwargs: Any, again: bool
    ) -> Iterator[tuple[Any, Any]]:
        """A context for a pass, with its arguments: lists and dicts are its own.

        Args:
            name: of the step.
            again: whether another pass of the same samples follows on this rank.

        Raises:
            TaskError: the pass has written to what the next one reads.
        """
        given = tree_map(lambda value: value, (args, kwargs))
        if not again:
            yield given
            return
        read = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        watched = [*(("its batch", leaf) for leaf in read), *self._buffers]
        before = [_version(tensor) for _, tensor in watched]
        target = self._task._log_target
        try:
            with uncounted(self._task, evaluates=target is not None and target.on_epoch):
                yield given
        finally:
            self._task._log_to(target)
        for (what, tensor), version in zip(watched, before, strict=True):
            if _version(tensor) != version:
                raise TaskError(
                    f"{type(self._task).__name__}.{name} writes to {what}, and a rank runs it once"
                    " for each of its engine.pipeline_chunks. Compute a new tensor in its place, or"
                    " set engine.pipeline_schedule=1f1b, with which it runs once."
                )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
