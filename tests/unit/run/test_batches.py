"""Microbatches of a step, of which an engine runs others in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet


def test_a_microbatch_logs_as_its_own_when_others_are_between(tmp_path: Path) -> None:
    """After its backward, also the last one, if all forwards of a step come first (gpipe)."""

    class Logs(Line):
        count = 0

        def on_after_backward(self) -> None:
            self.count += 1
            self.log("count", float(self.count), on_step=False, on_epoch=True)

    def all_forwards_first(microbatches: Any, calls: Any) -> None:
        for forwarded in [calls.forward(microbatch) for microbatch in microbatches]:
            calls.backward(forwarded)
            calls.leave(forwarded)

    def work(engine: Any) -> float:
        engine.run_microbatches = all_forwards_first
        trainer = quiet(tmp_path, engine=engine, accumulate_grad_batches=3)
        trainer.fit(Logs(), loader(12))
        return float(trainer.callback_metrics["count"])

    assert World(1).run(work) == [pytest.approx(2.0)]
