"""TrainState: the only mutable counters of a run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

PhaseName = Literal["fit", "sanity_check", "validate", "test", "predict"]


# of an epoch
_BEGINNING = {
    "step_in_epoch": 0,
    "batch_idx": 0,
    "validated_at": -1,
    "epoch_values": {},
    "epoch_done": False,
}


@dataclass
class TrainState:
    """The position of a run.

    Attributes:
        global_step: optimizer steps taken since the beginning.
        loop_steps: the same, but a batch of a Task with `automatic_optimization = False` counts
            once, whatever its number of optimizer steps; `log_every_n_steps` counts them.
        current_epoch: the epoch in progress, from 0; after it has ended, the next.
        step_in_epoch: steps taken in this epoch.
        batch_idx: microbatches this rank has trained on in this epoch.
        samples_seen: samples trained on by all ranks since the beginning.
        validated_at: the step of the last validation in this epoch; -1 before the first.
        epoch_values: the logged values of this epoch, which schedules read when it ends.
        step_open: whether the last step's end (its validation, its hooks) is pending.
        end_open: whether the validation at the epoch's or the run's end is pending.
        epoch_done: whether this epoch's data are used up; a checkpoint taken now starts with the
            next epoch, once the validation at the end is done.
        skipped_steps: steps without an update, skipped by mixed precision (gradients that are not
            finite).
        half_updated: between an update's first change of weights and its count.
        oom_pieces: pieces that each microbatch is split into for memory
            (trainer.halve_batch_on_oom); 1: not split.
        should_stop: set it (or call request_stop) to end after the current step.
        stops_at_once: whether the stop does not wait for trainer.min_epochs and min_steps.
        stop_reason: why, in words for the user.
        phase: what runs.
        is_validating: whether a validation inside a fit is in progress.
    """

    global_step: int = 0
    loop_steps: int = 0
    current_epoch: int = 0
    step_in_epoch: int = 0
    batch_idx: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    validated_at: int = -1
    epoch_values: dict[str, float] = field(default_factory=dict)
    step_open: bool = False
    end_open: bool = False
    epoch_done: bool = False
    half_updated: bool = field(default=False, metadata={"saved": False})
    oom_pieces: int = field(default=1, metadata={"saved": False})
    should_stop: bool = field(default=False, metadata={"saved": False})
    stops_at_once: bool = field(default=False, metadata={"saved": False})
    stop_reason: str | None = field(default=None, metadata={"saved": False})
    phase: PhaseName = field(default="fit", metadata={"saved": False})
    is_validating: bool = field(default=False, metadata={"saved": False})
    started: float = field(default_factory=time.monotonic, metadata={"saved": False})

    def follow(self, earlier: TrainState) -> None:
        """Count on from an earlier fit: for hooks and loggers of an evaluation."""
        self.global_step = earlier.global_step
        self.loop_steps = earlier.loop_steps
        self.current_epoch = earlier.current_epoch

    def request_stop(self, reason: str, at_once: bool = False) -> None:
        """End the run after the current step. Call it on all ranks at the same step."""
        self.should_stop = True
        self.stop_reason = reason
        self.stops_at_once |= at_once

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that a checkpoint saves."""
        saved = {f.name for f in fields(self) if f.metadata.get("saved", True)}
        state = {name: value for name, value in asdict(self).items() if name in saved}
        if self.epoch_done and not self.end_open:
            state |= {"current_epoch": self.current_epoch + 1, **_BEGINNING}
        return state

    def next_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.load_state_dict(
            self.state_dict() | {"current_epoch": self.current_epoch + 1, **_BEGINNING}
        )

    @property
    def fn(self) -> str:
        """The method of Trainer that runs, as in Lightning."""
        return "fit" if self.phase == "sanity_check" else self.phase

    @property
    def stage(self) -> str:
        """What runs, by Lightning's names."""
        of_fit = "validate" if self.is_validating else "train"
        return of_fit if self.phase == "fit" else self.phase

    @property
    def num_updates(self) -> int:
        """Updates made: steps without those that mixed precision skipped."""
        return self.global_step - self.skipped_steps

    @property
    def owes_validation(self) -> bool:
        """Whether a signal ended the run during a validation."""
        return self.step_open or self.end_open

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters from a checkpoint."""
        state = {"loop_steps": state["global_step"], **state}  # older checkpoints lack it
        for name in self.state_dict():
            value = state[name]
            setattr(self, name, dict(value) if isinstance(value, dict) else value)
