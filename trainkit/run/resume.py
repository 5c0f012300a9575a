"""How a fit resumes: from a checkpoint, or from host memory after its ranks changed.

rank 0 finds and verifies a checkpoint -> all ranks receive the state saved beside the weights ->
the Task's on_load_checkpoint may change these -> they are loaded -> the run is built with the plan
that applies -> states restored -> plans compared, and the differences printed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainkit.api.view import with_role
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.checkpoint.find import Loaded
from trainkit.checkpoint.manager import MEMORY
from trainkit.checkpoint.stateful import with_own_parts
from trainkit.console import plural, try_to_write
from trainkit.data.feed import StreamFeed
from trainkit.data.order import mix
from trainkit.data.seeding import seed_process
from trainkit.data.shares import parse_shares
from trainkit.data.streams import SplitStream
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import BatchPlan
from trainkit.run.first_weights import hand_to_callbacks, hand_to_task
from trainkit.run.parts import facts_of
from trainkit.run.run import Run
from trainkit.run.setup import Stage

_OF_ORDER = {"seed", "order", "samples"}  # of the facts
_OTHER_ORDER = (
    "the rest of this epoch is of another order, so that samples come twice, or not at all (resume"
    " with the settings before, or from a checkpoint of an epoch's end)"
)


def find_saved(stage: Stage, ckpt_path: str | None) -> dict[str, Any] | None:
    """Load the weights to resume from on rank 0; return the state saved beside them, on all ranks.

    Returns:
        None if there is nothing to resume from, and nothing or "auto" was requested.
    """
    restarts = stage.elastic is not None and not stage.is_elastic
    is_auto = str(ckpt_path).partition(":")[0] == "auto"
    if restarts and not is_auto and stage.engine.name in ("ddp", "fsdp"):
        raise ConfigError(
            "callbacks=elastic under torchrun, which restarts all processes when one is lost: they"
            " would begin from the start. Let them resume from the run's checkpoint: resume=auto"
            " run_dir=runs/mine (Trainer: ckpt_path='auto', run_dir)."
        )
    _tidy(stage)
    if ckpt_path is None and not stage.is_elastic:
        return None
    if stage.engine.splits_weights and stage.is_elastic:
        return _find_in_parts(stage, ckpt_path)
    change = partial(hand_to_task, stage.run)
    if stage.engine.splits_weights and ckpt_path is not None:
        return stage.checkpoints.open(ckpt_path, change)
    return stage.checkpoints.find(lambda: _read(stage, ckpt_path), stage.task, change)


def _tidy(stage: Stage) -> None:
    """Remove drafts of checkpoints that a killed run left,
    unless one is being written by an attempt of this process.
    """
    if stage.engine.ranks.is_main and not stage.checkpoints.writer.is_busy:
        for store in stage.checkpoints.stores:
            try_to_write(store.tidy, f"{store.place} could not be tidied")


def _read(stage: Stage, ckpt_path: str | None) -> Loaded | None:
    if stage.is_elastic and stage.elastic is not None:
        if stage.elastic.memory.step >= 0:
            return Loaded(MEMORY, *stage.elastic.memory.read())
        # No rank holds a commit: if rank 0 joined late, all earlier workers were lost; otherwise
        # the job is new.
        checkpoint = stage.checkpoints.read("auto") if stage.engine.ranks.joins_late else None
        if checkpoint is not None or ckpt_path is None:
            return checkpoint
    assert ckpt_path is not None
    return stage.checkpoints.read(ckpt_path)


def _find_in_parts(stage: Stage, ckpt_path: str | None) -> dict[str, Any] | None:
    """Do what `find_saved` does where each rank has a part of the weights: a rank that joins gets its
    part of the newest commit from a living one that has the same.
    """
    assert stage.elastic is not None
    memory = stage.elastic.memory
    ranks = stage.engine.ranks
    checkpoints = stage.checkpoints
    newest, is_late = stage.engine.comm.broadcast_object((memory.step, ranks.joins_late))
    if newest < 0:  # as in _read
        change = partial(hand_to_task, stage.run)
        saved = checkpoints.open("auto", change) if is_late else None
        if saved is None and ckpt_path is not None:
            saved = checkpoints.open(ckpt_path, change)
        return saved
    own = memory.load_into(stage.task) if memory.step == newest else None
    checkpoints.resumed_from = MEMORY
    beside: dict[str, Any] = with_own_parts(stage.engine.comm.from_living(own))
    hand_to_task(stage.run, beside, stage.task.state_dict())
    return beside


def declared_ranks(stage: Stage, saved: dict[str, Any] | None) -> int:
    """Return the number of ranks that the settings of batch and learning rate are meant for."""
    if stage.elastic is None or saved is None:
        return (
            stage.engine.ranks.first_world_size // stage.engine.ranks.model_size
            if stage.is_elastic
            else stage.engine.ranks.data_size
        )
    return BatchPlan(**saved["contract"]).world_size


def first_shares(stage: Stage, saved: dict[str, Any] | None) -> Sequence[int] | None:
    """Return the shares that a fit begins with:
    under callbacks=balance those of the checkpoint, else the user's.
    """
    given = stage.options.batch.rank_shares
    ranks = stage.engine.ranks.data_size
    if (
        saved is None
        or not with_role(stage.run.callbacks, "shares")
        or saved["contract"]["world_size"] != ranks
    ):
        return given
    # an older checkpoint has none
    return parse_shares(saved["contract"].get("rank_shares", "even"))


def restore(run: Run, saved: dict[str, Any] | None) -> None:
    """Seed this rank's random numbers;
    restore a run's state from its checkpoint, if any, and print the differences.
    """
    checkpoints = run.checkpoints
    engine = run.engine
    seed_process(mix(run.options.seed, engine.ranks.data_rank))
    if saved is None:
        return
    assert checkpoints.resumed_from is not None
    hand_to_callbacks(run, saved)
    left = checkpoints.restore(saved)
    if saved.get("datamodule") and run.datamodule is None:
        left.append("the state of a DataModule")
    if left:
        run.say(
            f"The checkpoint holds states that this run has no place for: {', '.join(left)}. It"
            " resumes without them."
        )
    before = len(saved["random"])
    from_memory = checkpoints.resumed_from_memory
    if before != engine.ranks.data_size:  # not the numbers of the beginning: their dropout was used
        seed_process(mix(run.options.seed, engine.ranks.data_rank, run.global_step))
    for policy in [] if from_memory else checkpoint_policies(run.callbacks):
        if not checkpoints.resumed_from.startswith(f"{policy.store_of(run.run_dir).place}/"):
            policy.renew()  # another run's checkpoint: this step is not saved here yet
    if before != engine.ranks.data_size and not from_memory:
        run.say(
            f"The checkpoint is of {plural(before, 'rank')}, this run has {engine.ranks.data_size}:"
            " random numbers begin again, all else resumes."
        )
    for note in engine.approximation.notes:
        run.say(note)
    _compare_plans(run, BatchPlan(**saved["contract"]), saved.get("facts", {}))


def _batches_of(run: Run, plan: BatchPlan) -> int:
    """Return the batches of a step that are taken of one stream: that of all ranks, or a rank's."""
    feed = run.train_feed
    is_split = isinstance(feed, StreamFeed) and isinstance(feed.stream, SplitStream)
    return plan.accumulate * plan.world_size if is_split else plan.accumulate


def _compare_plans(run: Run, saved: BatchPlan, facts: Mapping[str, Any]) -> None:
    """Print the changes since the checkpoint;
    inside an epoch, find the step that its samples led to.
    """
    state = run.state
    changes = [*saved.differences(run.batch_plan), *run.rates.changes]
    new = {name: now for name, now in facts_of(run).items() if facts.get(name, now) != now}
    for name in (one for one in new if state.step_in_epoch or one not in _OF_ORDER):
        was, now = ("null" if one is None else one for one in (facts[name], new[name]))
        changes.append(f"{name} was {was}, is {now}")
    changes += [_OTHER_ORDER] if state.step_in_epoch and new.keys() & _OF_ORDER else []
    before = saved.at(state.current_epoch)
    now = run.batch_plan.at(state.current_epoch)
    known = before.global_batch_size is not None and now.global_batch_size is not None
    sizes = (
        (before.global_batch_size, now.global_batch_size)
        if known
        else (_batches_of(run, before), _batches_of(run, now))
    )
    if state.step_in_epoch and sizes[0] != sizes[1]:
        step, again = divmod(state.step_in_epoch * sizes[0], sizes[1])  # type: ignore[operator]
        state.step_in_epoch = step
        state.batch_idx = step * now.accumulate
        what = "samples" if known else "batches"
        changes.append(
            f"step {step} of the epoch comes next, {again} {what} of it for the second time"
        )
    elif before.accumulate != now.accumulate:
        state.batch_idx = state.step_in_epoch * now.accumulate
    if changes:
        run.say(f"Changed since the checkpoint: {'; '.join(changes)}.")
