"""TrainState: counters that survive a restart."""

from __future__ import annotations

from trainkit.api.state import TrainState


def test_counters_round_trip() -> None:
    """Counters are restored as they were saved; a stop request is not."""
    state = TrainState(
        global_step=7,
        loop_steps=5,
        current_epoch=2,
        step_in_epoch=3,
        batch_idx=6,
        samples_seen=70,
        skipped_steps=1,
    )
    state.request_stop("enough")
    other = TrainState()
    other.load_state_dict(state.state_dict())
    assert other.state_dict() == state.state_dict()
    assert not other.should_stop
    assert other.stop_reason is None


def test_a_finished_epoch_is_saved_as_the_next() -> None:
    """A checkpoint taken when an epoch's data are used up starts with the next epoch."""
    saved = TrainState(
        global_step=7, current_epoch=2, step_in_epoch=3, batch_idx=6, epoch_done=True
    ).state_dict()
    assert (saved["current_epoch"], saved["step_in_epoch"], saved["batch_idx"]) == (3, 0, 0)
    assert saved["global_step"] == 7


def test_a_checkpoint_of_before_the_count_of_batches_is_restored() -> None:
    """Its updates are counted as batches, of one update each."""
    saved = TrainState(global_step=7, loop_steps=9, current_epoch=2).state_dict()
    del saved["loop_steps"]
    state = TrainState()
    state.load_state_dict(saved)
    assert (state.loop_steps, state.global_step, state.current_epoch) == (7, 7, 2)
