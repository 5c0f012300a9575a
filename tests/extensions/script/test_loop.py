"""A Loop's own body computes in the trials of a command, as a Task's training_step does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extensions.script.test_running import START, run
from trainkit.extensions.find.lr import sweep
from trainkit.extensions.find.workers import find_workers
from trainkit.run.around_fit import RequestedFit

SAMPLES = """
x = torch.randn(32, 2, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
torch.manual_seed(3)
"""
TASK = "trainer().fit(Line(), loader)"
LOOP = """
model = torch.nn.Linear(2, 1)
with trainkit.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, max_epochs=1,
                   logger=False, enable_checkpointing=False) as loop:
    for epoch in loop.epochs():
        for (x,) in loop.batches():
            loop.backward(model(x).square().mean())
"""


@pytest.mark.parametrize("body", [TASK, LOOP])
def test_a_sweep_goes_through_the_users_code(body: str, tmp_path: Path) -> None:
    """Over the ends of epochs; the losses of the Loop are those of the Task, bit for bit."""
    curves: list[Any] = []

    def look(fit: RequestedFit, _: Any) -> None:
        curves.append(sweep(fit.task, fit.data, fit.options, 1e-3, 0.5, 20, None))

    for text in (TASK, body):
        run(tmp_path, text, look=look, start=START + SAMPLES)
    first, second = curves
    assert len(first.losses) == 20 and first.losses[0] > first.losses[-1]
    assert (first.losses, first.lrs) == (second.losses, second.lrs)


def test_trials_of_a_loop_begin_one_after_another(tmp_path: Path) -> None:
    """Each trains its own number of steps, though the user's loop is in the middle of an epoch."""
    seen: list[Any] = []

    def look(fit: RequestedFit, _: Any) -> None:
        for _ in range(2):
            seen.append(find_workers(fit.task, fit.data, fit.options, steps=5, most=0))

    run(tmp_path, LOOP, look=look, start=START + SAMPLES)
    assert [[one.workers for one in tried] for tried, _ in seen] == [[0], [0]]
