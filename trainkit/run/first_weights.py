"""The weights that a fit or an evaluation begins with: placed, loaded, split over ranks and filled.

place_weights    on this rank's device, in their dtype
load_weights     of a new run: whole ones on rank 0, which sends them later (engine.prepare)
shard_weights    split by the engine, and filled in what this rank holds, if it holds parts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.checkpoint.handed import Handed
from trainkit.errors import CheckpointError, ConfigError
from trainkit.run.folder import is_of_another, set_aside
from trainkit.run.model import fill_parts, is_in_parts, load_whole
from trainkit.run.placement import place
from trainkit.run.replicas import model_of
from trainkit.run.run import Run
from trainkit.run.setup import Stage


@dataclass(frozen=True)
class StartFrom:
    """The start of a fit; see Trainer.fit."""

    ckpt_path: str | None = None
    init_weights: str | None = None
    strict: bool = True


def place_weights(stage: Stage) -> None:
    """Place a Task's weights before any are loaded, since loading casts;
    all ranks have the same model.
    """
    _place(stage)
    stage.replicas.compare("model", lambda: model_of(stage.task))


def _place(stage: Stage) -> None:
    channels_last = stage.options.numerics.uses_channels_last(stage.engine.device)
    place(stage.task, stage.engine, stage.run.precision, channels_last)


def load_weights(stage: Stage, start: StartFrom, saved: dict[str, Any] | None) -> None:
    """Begin a new run: load `init_weights` if each rank holds all weights; or begin it at another
    run's checkpoint.
    """
    on_main = stage.engine.comm.run_on_main
    if saved is not None:
        # rank 0's answer: other ranks may know the folder under another path
        on_main(
            lambda: None if stage.checkpoints.resumed_in_place else _leave_an_earlier_run(stage.run)
        )
        return
    on_main(lambda: _refuse_anothers_checkpoints(stage.run))
    if not is_in_parts(stage.task):
        _load(stage, start, in_parts=False)


def shard_weights(stage: Stage, start: StartFrom, saved: dict[str, Any] | None) -> None:
    """Let the engine split the weights;
    fill this rank's parts from the opened checkpoint, or with first weights.
    """
    in_parts = is_in_parts(stage.task)
    stage.engine.shard(stage.task)
    if stage.checkpoints.opened is not None:
        stage.checkpoints.opened.fill_weights(stage.task)
        stage.task._first_weights = None  # they are replaced
    elif in_parts and saved is None:
        _load(stage, start, in_parts=True)


def hand_to_task(run: Run, saved: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call the Task's on_load_checkpoint; return the weights to load. What hooks added is in `saved`,
    for those of callbacks.
    """
    if "extra" not in saved or not run.hooks.has("on_load_checkpoint"):
        return weights
    handed = Handed(saved["extra"], saved["state"])
    handed["state_dict"] = weights
    run.hooks.of_task("on_load_checkpoint", handed)
    saved["extra"], changed = handed.split()
    return changed or {}


def hand_to_callbacks(run: Run, saved: dict[str, Any]) -> None:
    """Call on_load_checkpoint of callbacks."""
    if "extra" in saved:
        run.hooks.of_callbacks("on_load_checkpoint", Handed(saved["extra"], saved["state"]))


def load_datamodule(stage: Stage, saved: Mapping[str, Any] | None) -> None:
    """Let a DataModule take back its state, before its loaders are made: they may follow from it."""
    if stage.data.datamodule is not None and saved is not None and "datamodule" in saved:
        stage.data.datamodule.load_state_dict(saved["datamodule"])


def load_to_evaluate(stage: Stage, ckpt_path: str | None) -> None:
    """Place the weights of an evaluation: those of a checkpoint or a file, or the Task's own; then
    the DataModule and the hooks take what they left in that checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    task = stage.task
    engine = stage.engine
    checkpoints = stage.checkpoints
    _place(stage)
    is_file = ckpt_path is not None and Path(ckpt_path).is_file()
    in_parts, opens = is_in_parts(task), engine.splits_weights and not is_file
    beside: dict[str, Any] = {}
    change = partial(hand_to_task, stage.run)
    if ckpt_path is not None and is_file and not in_parts:
        engine.comm.run_on_main(lambda: load_whole(task, ckpt_path))
        checkpoints.resumed_from = ckpt_path
    elif ckpt_path is not None and not in_parts and not opens:
        saved = checkpoints.find(lambda: checkpoints.read(ckpt_path, False), task, change)
        if saved is None:
            raise CheckpointError(
                f"ckpt_path is '{ckpt_path}', and there is no checkpoint in"
                f" {checkpoints.stores[0].place}."
            )
        beside = saved
    engine.shard(task)
    if ckpt_path is not None and opens:
        checkpoints.open(ckpt_path, change, resume=False)
    if checkpoints.opened is not None:
        beside = checkpoints.opened.training
        checkpoints.opened.fill_weights(task)
        task._first_weights = None  # they are replaced
        checkpoints.opened.close()
    elif in_parts:
        fill_parts(task, engine, ckpt_path)
        checkpoints.resumed_from = ckpt_path or checkpoints.resumed_from
    load_datamodule(stage, beside)
    hand_to_callbacks(stage.run, beside)


def _refuse_anothers_checkpoints(run: Run) -> None:
    """Refuse a new run in another run's checkpoint folder:
    it would replace and delete those checkpoints.
    """
    for policy in checkpoint_policies(run.callbacks):
        if policy.dirpath and (there := policy.store_of(run.run_dir).names()):
            shown = f"{', '.join(there[:3])}{', ...' * (len(there) > 3)}"
            raise ConfigError(
                f"ModelCheckpoint.dirpath is '{policy.dirpath}', which holds checkpoints of another"
                f" run ({shown}). Resume from them (ckpt_path=last, or resume=auto), or give"
                " another folder."
            )


def _leave_an_earlier_run(run: Run) -> None:
    """Move an earlier run's files aside if this one began at a checkpoint in another run's folder.
    One elsewhere, as of Trainer.save_checkpoint or Ray, may be of the run in this folder.
    """
    if is_of_another(run.checkpoints.resumed_from or "", run.run_dir):
        _refuse_anothers_checkpoints(run)
        set_aside(run.run_dir)


def _load(stage: Stage, start: StartFrom, in_parts: bool) -> None:
    """Fill a new run's weights: those of this rank's parts, or whole ones on rank 0, which sends
    them later. Then move an earlier run's files aside: they may be among these.
    """
    task = stage.task
    engine = stage.engine
    weights = start.init_weights
    mismatches: list[str] = []
    if in_parts:
        mismatches = fill_parts(task, engine, weights, start.strict)
    elif weights is not None:
        mismatches = engine.comm.run_on_main(lambda: load_whole(task, weights, start.strict))
    if weights is not None:
        without = (
            ", without those that do not match:\n  " + "\n  ".join(mismatches) if mismatches else ""
        )
        stage.run.say(f"Weights from {weights}{without}.")
    if stage.run.is_global_zero:
        set_aside(stage.run.run_dir)
