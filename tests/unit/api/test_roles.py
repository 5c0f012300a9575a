"""What a callback is to a run: its class says it, not its attributes and not its name;
the order of hooks follows from it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback, in_order
from trainkit.api.dispatch import Hooks
from trainkit.api.view import Role, with_role
from trainkit.callbacks import (
    Balance,
    EarlyStopping,
    Elastic,
    GradientMonitor,
    ModelCheckpoint,
    ProgressBar,
    Timeline,
)
from trainkit.callbacks.step_clock import StepClock
from trainkit.errors import ConfigError


class Own(Callback):
    """A user's callback, with attributes that callbacks of trainkit have too."""

    address = "of its own"
    commit_every_n_steps = max_microbatch = 4
    refresh_rate = stopping_threshold = 0.5

    def save_now(self) -> None:
        """Save something of its own."""


def test_attributes_make_no_role(tmp_path: Path) -> None:
    """A callback with a method save_now and such attributes is a plain one:
    it saves nothing, and the run is not elastic.
    """
    trainer = quiet(tmp_path, callbacks=[Own()])
    trainer.fit(Line(), loader(8))
    assert trainer.checkpoint_callbacks == trainer.early_stopping_callbacks == []
    assert trainer.progress_bar_callback is None and trainer.run.elastic is None


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        (Balance, "shares"),
        (EarlyStopping, "early_stopping"),
        (Elastic, "elastic"),
        (ModelCheckpoint, "checkpoints"),
        (ProgressBar, "progress_bar"),
    ],
)
def test_a_derived_class_has_the_role(kind: type[Callback], role: Role) -> None:
    """Whatever it is called."""
    own = type("Own", (kind,), {})(**({"monitor": "loss"} if kind is EarlyStopping else {}))
    assert with_role([Callback(), own, StepClock()], role) == [own]


def test_a_name_makes_no_need(tmp_path: Path) -> None:
    """A user's class that is called as one of trainkit's may do anything;
    one that derives from it needs the same.
    """

    class WeightAveraging(Callback):
        """Averages nothing."""

    quiet(tmp_path, callbacks=[WeightAveraging()], communication="diloco", max_steps=1).fit(
        Line(), loader(8)
    )
    assert type("Mine", (GradientMonitor,), {}).needs_of_engine == {"gradients", "layers"}  # type: ignore[attr-defined]


def test_a_callback_that_the_communication_does_not_serve_is_named(tmp_path: Path) -> None:
    """By the user's class, with the reason."""

    class Averages(Callback):
        needs_of_engine = frozenset({"equal_weights"})

    trainer = quiet(tmp_path, callbacks=[Averages()], communication="diloco", max_steps=1)
    with pytest.raises(
        ConfigError,
        match="communication is 'diloco', and the callback Averages averages or compares the",
    ):
        trainer.fit(Line(), loader(8))


class Watch(Callback):
    """Has the hook whose order is looked at."""

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Do nothing."""


class Monitor(Watch):
    """Sees what others have logged."""

    monitors = True


class Last(Watch):
    """Sees all changes."""

    runs_last = True


class Watched(Line):
    """Has the hook too."""

    def on_train_start(self) -> None:
        """Do nothing."""


ORDER = [Timeline, StepClock, Watch, Watched, Monitor, Last, ModelCheckpoint, Elastic]


def test_hooks_have_one_order() -> None:
    """Those that measure, plain ones, the Task's, those that monitor or run last, checkpoints,
    commits; however given.
    """
    callbacks = [kind() for kind in ORDER if issubclass(kind, Callback)]
    random.Random(0).shuffle(callbacks)
    # two that measure: as they were given
    callbacks.sort(key=lambda callback: not isinstance(callback, Timeline))
    assert [type(callback) for callback in in_order(callbacks)] == [
        kind for kind in ORDER if kind is not Watched
    ]
    trainer: Any = None
    owners = Hooks(trainer, Watched(), callbacks).owners("on_train_start")
    assert [name for name in owners if name != "HookLog"] == [kind.__name__ for kind in ORDER]
    assert owners.index("HookLog") == 1 + owners.index("Watched"), (
        "what hooks have logged is combined for those that monitor"
    )
