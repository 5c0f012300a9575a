"""Passes: a stage's part of one forward, within the step that the user wrote.

For each of its stages a rank runs the whole step, on the same samples as all others of the model.
Of the Task's units (units.py)

    of an earlier stage   return placeholders
    of this stage         compute; where the first one has placeholders as arguments, the tensors
                          that the previous stage sends take their place
    of a later stage      the first one ends the step here: its arguments are handed on

so masks, positions and all that is made of the batch is computed on each stage, and does not
travel. A step's random numbers outside of units are the same on all stages, since they may choose
what the first stage trains on and the last one compares with; within them each stage has its own.

A rank with several stages computes the units of an earlier one of its own in another pass: in this
one they return placeholders like what they have returned there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from trainkit.engine.base import HandedOn
from trainkit.errors import TaskError
from trainkit.extensions.fsdp.random_numbers import drawn_seed, numbers_of, seed_torch
from trainkit.extensions.pipeline.links import Links, Message
from trainkit.extensions.pipeline.placeholder import Placeholder, placeholder, shape_of
from trainkit.extensions.pipeline.units import Unit

_NOT_A_CHAIN = (
    "A pipeline needs a chain: each stage computes from what the stage before it hands to its first"
    " layer. Move the computation into a layer, or return the modules of each stage, in the order"
    " of their calls, from the Task's pipeline_stages()."
)
_RECOMPUTE = (
    "In place of torch.utils.checkpoint set trainer.activation_checkpointing=true, which computes"
    " blocks again within their stage."
)

Kind = tuple[str, bool, int]


class _StageEnd(BaseException):
    """A unit of a later stage was called; not an Exception, which a step may catch."""

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves


@dataclass
class Pass:
    """One forward of a stage.

    Attributes:
        kind: the step's name, whether gradients are computed, and the stage.
        seed: of the step's random numbers.
        received: what stands for each placeholder by its id; the placeholders stay in `inputs`.
        inputs: placeholders and the tensors in their place.
        outputs: what was handed on.
        sent: the message with them.
        coming: their gradients, if this rank has begun to receive them.
        has_run: whether a unit of this stage has computed.
    """

    kind: Kind
    seed: int
    received: dict[int, Tensor] = field(default_factory=dict)
    inputs: list[tuple[Placeholder, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    sent: Message = field(default_factory=list)
    coming: Message = field(default_factory=list)
    has_run: bool = False

    @property
    def stage(self) -> int:
        """That of the kind."""
        return self.kind[2]

    @property
    def trained_outputs(self) -> list[Tensor]:
        """Outputs for which gradients come."""
        return [tensor for tensor in self.outputs if tensor.requires_grad]

    def filled(self, value: Any) -> Any:
        """Return the tensor that stands for a received placeholder; any other value as it is."""
        return self.received.get(id(value), value) if type(value) is Placeholder else value


class Passes:
    """The passes of this rank's stages.

    Args:
        place: of this rank among those of a model, by their first stages.
        ranks: of a model.
        chunks: stages of a rank.

    Attributes:
        current: the pass that is under way; None outside of steps.
    """

    def __init__(
        self, links: Links, place: int, ranks: int, device: torch.device, chunks: int = 1
    ) -> None:
        self._links, self._device = links, device
        self._place, self._ranks, self._chunks = place, ranks, chunks
        self._last = ranks * chunks - 1
        self.current: Pass | None = None
        # by kind of pass: the places among arguments that this stage asks for, and is asked for
        self._asked: dict[Kind, list[int]] = {}
        self._wanted: dict[Kind, list[int]] = {}
        self._shapes: dict[Any, Any] = {}

    def __deepcopy__(self, memo: Any) -> Passes:
        return self  # a copy of a module, as an average of its weights, is of the same stage

    # -- a step -------------------------------------------------------------------------------------------------------

    def cutting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that ends where a later stage begins, with what is handed on."""

        @functools.wraps(step)
        def cut(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except _StageEnd as end:
                self._own.outputs = self._handed(end.leaves)
                return tuple(self._own.outputs)

        return cut

    def begin(self, name: str, chunk: int = 0, seed: int | None = None) -> Pass:
        """Return a pass to run.

        Args:
            name: of the step.
            chunk: of this rank's stages.
            seed: of an earlier pass of the same samples; None for the first.
        """
        stage = chunk * self._ranks + self._place
        if seed is None:
            seed = drawn_seed()
        kind = name, torch.is_grad_enabled(), stage
        return Pass(kind, seed)

    def run(self, own: Pass, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a stage's part of a step.

        Returns:
            The step's outputs on the last stage, else HandedOn.
        """
        self.current = own
        with numbers_of(own.seed):
            try:
                outputs = step(*args, **kwargs)
            finally:
                self.current = None
        name, _, stage = own.kind
        if not own.has_run or bool(stage) != bool(own.inputs):
            raise TaskError(
                f"{name} ended before the layers of pipeline stage {stage} were called."
                f" {_NOT_A_CHAIN}"
            )
        if stage == self._last:
            if any(type(leaf) is Placeholder for leaf in tree_leaves(outputs)):
                raise TaskError(
                    f"{name} returned what the last pipeline stage does not have: it was computed"
                    f" from what other stages hold. {_NOT_A_CHAIN}"
                )
            return outputs
        if not own.outputs:
            raise TaskError(
                f"{name} ended on pipeline stage {stage} before a layer of a later stage was"
                f" called. {_NOT_A_CHAIN}"
            )
        own.sent = self._links.send(stage, own.outputs)
        return HandedOn()

    @property
    def _own(self) -> Pass:
        assert self.current is not None
        return self.current

    # -- a unit -------------------------------------------------------------------------------------------------------

    def call(
        self, unit: Unit, compute: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call a unit in the pass that is under way."""
        if self.current is None:
            if any(type(leaf) is Placeholder for leaf in tree_leaves((tuple(args), kwargs))):
                raise TaskError(
                    f"'{unit.name}' is computed again in backward, from what an earlier pipeline"
                    f" stage computes. {_RECOMPUTE}"
                )
            if unit.stage % self._ranks == self._place:
                return compute(*args, **kwargs)
            raise TaskError(
                f"'{unit.name}' was called outside of a step, and its weights are on the ranks of"
                f" pipeline stage {unit.stage}. Call it in training_step, validation_step,"
                f" test_step or predict_step. {_RECOMPUTE}"
            )
        own = self.current
        leaves, tree = tree_flatten((tuple(args), kwargs))
        if unit.stage > own.stage:
            raise _StageEnd(leaves)
        if unit.stage < own.stage:
            return self._of_earlier(unit, leaves, tree)
        places = [
            place
            for place, leaf in enumerate(leaves)
            if type(leaf) is Placeholder and id(leaf) not in own.received
        ]
        if places:
            self._receive(unit, places, leaves)
        if not own.has_run:
            own.has_run = True
            seed_torch(own.seed + 1 + own.stage)
        args, kwargs = tree_unflatten([own.filled(leaf) for leaf in leaves], tree)
        outputs = compute(*args, **kwargs)
        if self._chunks > 1:
            self._note_shapes(_key(unit, leaves, tree), outputs)
        return outputs

    def _receive(self, unit: Unit, places: list[int], leaves: list[Any]) -> None:
        own = self._own
        if own.inputs:
            raise TaskError(
                f"'{unit.name}' of pipeline stage {own.stage} takes what an earlier stage"
                f" computes, and did not hand to the first layer of this one. {_NOT_A_CHAIN}"
            )
        known = self._asked.get(own.kind)
        if known is None:
            self._asked[own.kind] = places
            self._links.request(own.stage, places)
        elif known != places:
            raise TaskError(
                f"The arguments of '{unit.name}' that earlier pipeline stages compute change from"
                f" one {own.kind[0]} to the next. {_NOT_A_CHAIN}"
            )
        received = self._links.receive(own.stage)
        if own.kind[1] and not torch.is_grad_enabled() and any(t.requires_grad for t in received):
            raise TaskError(
                f"'{unit.name}', the first layer of pipeline stage {own.stage}, is called without"
                " gradients, and what it takes is trained: by torch.utils.checkpoint with"
                f" use_reentrant=True, or torch.no_grad(). {_RECOMPUTE} Freeze layers before"
                " torch.no_grad() that are not to be trained."
            )
        for place, tensor in zip(places, received, strict=True):
            own.received[id(leaves[place])] = tensor
            own.inputs.append((leaves[place], tensor))

    def _handed(self, leaves: list[Any]) -> list[Tensor]:
        own = self._own
        if own.kind not in self._wanted:
            self._wanted[own.kind] = self._links.requested(own.stage)
        handed = [own.filled(leaves[place]) for place in self._wanted[own.kind]]
        if any(not isinstance(each, Tensor) or type(each) is Placeholder for each in handed):
            raise TaskError(
                f"What pipeline stage {own.stage} must hand on was computed from what it does not"
                f" hold. {_NOT_A_CHAIN}"
            )
        return handed

    def _of_earlier(self, unit: Unit, leaves: list[Any], tree: Any) -> Any:
        """Return placeholders like what a unit of an earlier stage returns."""
        key = _key(unit, leaves, tree)
        if key not in self._shapes:
            with torch.no_grad(), _without_weights(unit.module):
                blank = [placeholder(leaf, self._device) for leaf in leaves]
                args, kwargs = tree_unflatten(blank, tree)
                self._note_shapes(key, unit.module.forward(*args, **kwargs))
        return tree_map(
            lambda value: Placeholder(value, self._device) if isinstance(value, Tensor) else value,
            self._shapes[key],
        )

    def _note_shapes(self, key: Any, outputs: Any) -> None:
        if key not in self._shapes:
            self._shapes[key] = tree_map(_shape_of, outputs)


def _key(unit: Unit, leaves: Sequence[Any], tree: Any) -> Any:
    """Return what the shapes of a unit's outputs depend on."""
    shapes = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    ]
    return unit.name, unit.module.training, str(tree), str(shapes)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def stage_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules that ask the passes before they compute; it has the class's name."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _stage_class(kind)
    return _CLASSES[kind]


def _stage_class(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes, unit = self._pipeline_place
        return passes.call(unit, functools.partial(kind.__call__, self), args, kwargs)

    made = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


def _shape_of(value: Any) -> Any:
    return shape_of(value) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _without_weights(unit: nn.Module) -> Iterator[None]:
    """Within the context a unit has no values: a weight that stages share is there otherwise."""
    here = [
        (module, name, own)
        for module in unit.modules()
        for name, own in module._parameters.items()
        if own is not None and not own.is_meta
    ]
    for module, name, own in here:
        module._parameters[name] = nn.Parameter(shape_of(own), requires_grad=False)
    try:
        yield
    finally:
        for module, name, own in here:
            module._parameters[name] = own
