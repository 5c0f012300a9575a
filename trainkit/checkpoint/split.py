"""Checkpoints of ranks that hold a part of the weights each: what a rank writes, and how it takes
its part back.

snapshot        this rank's pieces and, on rank 0, all that is whole, copied to the host
Opened          a checkpoint on all ranks; fill_weights fills this rank's part, whatever engine and number of ranks wrote it
fill_optimizer  the same for an optimizer's state
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.checkpoint.find import fetched
from trainkit.checkpoint.format import (
    Snapshot,
    find_aliases,
    load_extra,
    load_training,
    open_weights,
)
from trainkit.checkpoint.mismatch import mismatches, under_names_of, unfit
from trainkit.checkpoint.parts import RankFile
from trainkit.checkpoint.pieces import MODEL, StoredPieces, split_tree
from trainkit.checkpoint.stateful import require_plain
from trainkit.checkpoint.store import Store
from trainkit.checkpoint.writer import Writer
from trainkit.device.shards import is_spread, local_of
from trainkit.engine.base import Engine
from trainkit.engine.pieces import OwnPart, Piece, fill
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.optim.optimizer_state import is_torchs, load_state, parts_beside, state_of


def snapshot(
    engine: Engine,
    writer: Writer,
    weights: Mapping[str, Tensor],
    training: Any,
    about: dict[str, Any],
    token: int,
) -> Snapshot:
    """Copy what this rank writes of a checkpoint to the host; waits for the last one to be written.

    Args:
        weights: the task's, by name.
        training: all else; None for weights only.
        token: of this checkpoint, the same on all ranks.
    """
    here = {name: tensor for name, tensor in weights.items() if not tensor.is_meta}
    held, aliases = find_aliases({name: local_of(tensor) for name, tensor in here.items()})
    absent: set[str] = set()
    if engine.ranks.pipeline_size > 1:
        aliases, absent = _over_stages(engine, aliases, weights, training)
    tree, spread = split_tree(training, lambda key, tensor: key in absent or is_spread(tensor))
    tensors = {MODEL + name: weights[name] for name in held} | spread
    pieces = {key: _piece(engine, tensor, key in absent) for key, tensor in tensors.items()}
    own = {key: piece for key, piece in pieces.items() if piece.is_first}
    boxes = {
        key: (list(p.shape), _name(p.local.dtype), list(p.at), list(p.local.shape))
        for key, p in own.items()
    }
    is_main = engine.ranks.is_main
    writer.wait()
    copied = writer.host.take(
        {"pieces": {key: p.local for key, p in own.items()}, "training": tree if is_main else None}
    )
    writer.host.mark()
    part = RankFile(engine.ranks.rank, engine.ranks.world_size, token, copied["pieces"], boxes)
    return Snapshot({}, aliases, copied["training"], about, part)


def _over_stages(
    engine: Engine,
    aliases: dict[str, str],
    weights: Mapping[str, Tensor],
    training: Any,
) -> tuple[dict[str, str], set[str]]:
    """Return the aliases of all pipeline stages, and the keys of tensors that one of them lacks."""
    tensors = {MODEL + name: tensor for name, tensor in weights.items()}
    tensors |= split_tree(training, lambda key, tensor: True)[1]
    absent = {key for key, tensor in tensors.items() if tensor.is_meta}
    merged: dict[str, str] = {}
    for names, keys in engine.comm.all_gather_object((aliases, absent)):
        merged |= names
        absent |= keys
    return merged, absent


def _piece(engine: Engine, tensor: Tensor, is_stages: bool) -> Piece:
    """Return this rank's part of a tensor. If stages lack it, a rank that has all of it is alone."""
    piece = engine.piece_of(tensor)
    is_whole = not tensor.is_meta and not is_spread(tensor)
    return piece._replace(is_first=True) if is_stages and is_whole else piece


class Opened:
    """A checkpoint that all ranks read.

    Args:
        path: its path or URL; verified.
        stores: one of them has it, unless it is another run's.
        resume: whether to read what was saved beside the weights.

    Attributes:
        training: what was saved beside the weights, at most that of `load_extra` if not `resume`;
            tensors in pieces are read when they are needed.

    Raises:
        CheckpointError: a rank cannot read it; on all ranks.
    """

    def __init__(
        self, engine: Engine, path: str, resume: bool, stores: Sequence[Store] = ()
    ) -> None:
        self._engine = engine
        self._stack = contextlib.ExitStack()
        error = ""
        self.training: dict[str, Any] = {}
        try:
            self._folder = self._stack.enter_context(fetched(path, stores))
            read = partial(load_training, mapped=True) if resume else load_extra
            self.training = read(self._folder)
            self._stored: dict[str, Any] = {**open_weights(self._folder).stored_weights()}
        except (CheckpointError, ConfigError, OSError) as failed:
            error = str(failed)
        failures = [
            (rank, text) for rank, text in enumerate(engine.comm.all_gather_object(error)) if text
        ]
        if failures:
            raise CheckpointError(
                f"{path} cannot be read on rank {failures[0][0]}: {failures[0][1]} Each rank reads"
                " its part of a checkpoint: the run's folder must be on storage that all hosts"
                " share, or the checkpoints at a URL (ModelCheckpoint.dirpath)."
            )

    def change(self, change: Callable[..., dict[str, Tensor]]) -> None:
        """Let a hook rename, drop or replace weights before they are read; see manager.Change.

        Raises:
            CheckpointError: it computed one of those whose values are not read yet.
        """
        named = {
            name: torch.empty(tuple(one.shape), dtype=one.dtype, device="meta")
            for name, one in self._stored.items()
        }
        # tensors hash by identity
        stored = {named[name]: one for name, one in self._stored.items()}
        changed = change(self.training, named)
        self._stored = {name: stored.get(one, one) for name, one in changed.items()}
        if computed := [name for name, one in changed.items() if one.is_meta and one not in stored]:
            raise CheckpointError(
                f"on_load_checkpoint has computed the weight {computed[0]} from those of the"
                f" checkpoint, which engine={self._engine.name} reads later, in parts: here it can"
                " rename and drop them, and add others."
            )

    def fill_weights(self, task: nn.Module) -> None:
        """Fill this rank's part of the task's weights."""
        fill_weights(self._folder, self._engine, task, self._stored)

    def close(self) -> None:
        """Remove what was downloaded."""
        self._stack.close()


def fill_weights(folder: Path, engine: Engine, task: nn.Module, stored: dict[str, Any]) -> None:
    """Fill this rank's part of all weights and buffers from those stored in a checkpoint's folder.

    Raises:
        CheckpointError: it does not fit this model.
    """
    state = engine.model_state(task)
    stored = under_names_of(state, stored)
    lines = mismatches(
        {name: one.shape for name, one in stored.items()},
        {name: tensor.shape for name, tensor in state.items()},
    )
    if lines:
        raise unfit(folder, lines)
    for name, one in stored.items():
        fill(engine.piece_of(state[name].detach()), one)


def fill_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], engine: Engine, casts: bool = False
) -> None:
    """Load an optimizer's state of which each rank takes the parts that belong to its parts of the
    parameters. `casts` as in load_state.

    Raises:
        ValueError: it is the state of other parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    filled: dict[Any, Any] = {}
    for index, entries in saved["state"].items() if is_torchs(saved) else ():
        if not isinstance(index, int):  # beside the weights'
            filled[index] = entries
            continue
        if index >= len(parameters):
            raise ValueError(
                f"it has a state for parameter {index}, and there are {len(parameters)}"
            )
        if parameters[index].is_meta:  # another pipeline stage updates it
            continue
        filled[index] = {
            name: _like(parameters[index].detach(), value, engine)
            for name, value in entries.items()
        }
    whole = tree_map(_whole, {**saved, "state": filled} if is_torchs(saved) else {**saved})
    load_state(optimizer, whole, casts)


def require_saveable(optimizers: Sequence[torch.optim.Optimizer], engine: Engine) -> None:
    """Refuse optimizers with a state that cannot be saved, or that `fill_optimizer` could not
    restore: after the first step, and not at the first checkpoint.

    Raises:
        TaskError: there is one.
    """
    for place, optimizer in enumerate(optimizers):
        if not engine.saves_together:
            require_plain(state_of(optimizer), f"optimizers[{place}]")
            continue
        if not engine.splits_weights:  # the state is the engine's own, as DeepSpeed's
            continue
        if names := parts_beside(optimizer.state_dict(), engine.ranks.pipeline_size > 1):
            raise TaskError(
                f"The state of {type(optimizer).__name__} has tensors in '{names[0]}', beside its"
                f" weights' own, and each rank of engine={engine.name} holds a part of them: no run"
                " could resume from a checkpoint. Take engine=ddp or horovod, or another optimizer;"
                " trainer.enable_checkpointing=false trains without checkpoints."
            )


def _like(parameter: Tensor, value: Any, engine: Engine) -> Any:
    """Return a saved value, spread over the ranks as its parameter
    is if it has the parameter's shape.
    """
    if not isinstance(value, (Tensor, StoredPieces, OwnPart)):
        return value
    if not value.shape or tuple(value.shape) != tuple(parameter.shape):
        return _whole(value)
    tensor = torch.zeros_like(parameter, dtype=value.dtype)
    fill(engine.piece_of(tensor), value)
    return tensor


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, (StoredPieces, OwnPart)) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
