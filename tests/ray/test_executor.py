"""RayExecutor on a real cluster: functions on ranks, their results by rank, and the first error."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.callbacks import Elastic
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.ray.cluster import connected
from trainkit.extensions.ray.options import options_of
from trainkit.extensions.ray.slots import Slots
from trainkit.launch.ray import RayExecutor


@pytest.fixture(scope="module")
def ranks(cluster: Any) -> Iterator[RayExecutor]:
    """Two ranks, one on each node."""
    with RayExecutor(2, placement_strategy="STRICT_SPREAD") as executor:
        yield executor


def summed(value: float, scale: float = 1.0) -> tuple[int, int, float]:
    """Sum over all ranks."""
    hvd.init()
    total = hvd.allreduce(torch.tensor([value * (hvd.rank() + 1)]), op=hvd.Sum).item()
    return hvd.rank(), hvd.local_size(), total * scale


class Line(trainkit.Task):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder: str, fails: bool = False) -> tuple[int, int, list[float]]:
    """Fit with a Trainer."""
    torch.set_num_threads(1)
    task = Line()
    trainer = trainkit.Trainer(
        max_epochs=2,
        run_dir=folder,
        logger=False,
        enable_progress_bar=False,
        callbacks=[Elastic(commit_every_n_steps=1)],
    )
    rows = torch.arange(16.0).reshape(8, 2) / 16
    trainer.fit(task, train_dataloaders=DataLoader(TensorDataset(rows), batch_size=2))
    if fails and trainer.global_rank == 1:
        raise ValueError("of the user's")
    return trainer.global_rank, trainer.world_size, task.net.weight.flatten().tolist()


def failing() -> None:
    """Raise on rank 1, while rank 0 waits for it."""
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("of rank 1")
    hvd.allreduce(torch.ones(1), name="never")


def exiting() -> None:
    """End the process of rank 1, while rank 0 waits for it."""
    hvd.init()
    if hvd.rank() == 1:
        os._exit(3)
    hvd.allreduce(torch.ones(1), name="never")


def killed() -> None:
    """Kill the process of rank 1, as the kernel does without memory."""
    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1), name="never")


def exiting_in_fit() -> None:
    """End the process of rank 1 of an elastic job, before it trains."""
    if os.environ["TRAINKIT_SLOT"] == "0":
        os._exit(3)
    time.sleep(60)


def test_results_come_by_rank(ranks: RayExecutor) -> None:
    """Arguments reach each rank, and a second call finds the same ranks, on two nodes."""
    assert ranks.run(summed, args=(1.0,), kwargs={"scale": 2.0}) == [(0, 1, 6.0), (1, 1, 6.0)]
    assert ranks.run(summed, args=(2.0,)) == [(0, 1, 6.0), (1, 1, 6.0)]


def test_a_trainer_runs_in_the_ranks(ranks: RayExecutor, tmp_path: Path) -> None:
    """engine=auto is Horovod's there, and both ranks have the same weights."""
    first, second = ranks.run(fitted, args=(str(tmp_path),))
    assert (first[:2], second[:2], first[2]) == ((0, 2), (1, 2), second[2])


@pytest.mark.parametrize(
    ("fn", "kind", "text"),
    [
        (failing, KeyError, "of rank 1"),
        (
            exiting,
            EngineError,
            r"^Rank 1 ended its process with exit code 3 \(os\._exit\): see its output\.$",
        ),
        (
            killed,
            EngineError,
            (
                "^Rank 1 was lost: its process was killed by a signal .* Ray's report: The actor is"
                " dead"
            ),
        ),
    ],
)
def test_the_first_error_ends_all(cluster: Any, fn: Any, kind: type[Exception], text: str) -> None:
    """A rank's own exception comes out of `run`, though another rank waits for it; then the
    executor has no ranks.

    Of a rank whose process ended without one, the rank and the exit code are named. Nothing has
    Ray's colours.
    """
    with RayExecutor(2) as executor:
        with pytest.raises(kind, match=text) as caught:
            executor.run(fn)
        assert "\x1b" not in "".join(traceback.format_exception(caught.value))
        with pytest.raises(EngineError, match="An error has ended the ranks"):
            executor.run(summed, args=(1.0,))


def test_an_elastic_executor_fits(cluster: Any, tmp_path: Path) -> None:
    """With two numbers the ranks are processes under the elastic driver;
    results are those of the ranks at the end.
    """
    with RayExecutor((2, 3)) as executor:
        results = executor.run(fitted, args=(str(tmp_path),))
        assert [rank for rank, _, _ in results] == list(range(len(results))) and len(results) >= 2
        assert all(result[2] == results[0][2] for result in results)
        with pytest.raises(ValueError, match="of the user's"):
            executor.run(fitted, args=(str(tmp_path / "other"), True))
        with pytest.raises(
            EngineError,
            match=(
                r"exit code 3, .* function's: worker \S+/0#1 ended with exit code 3: see its output"
            ),
        ):
            executor.run(exiting_in_fit)


def test_a_function_without_trainer_needs_a_fixed_number(cluster: Any) -> None:
    """hvd.init() in an elastic executor would wait forever: it is refused, with what to use."""
    with (
        RayExecutor((1, 2)) as executor,
        pytest.raises(EngineError, match="RayExecutor with a fixed num_workers"),
    ):
        executor.run(summed, args=(1.0,))


def test_resources_that_never_come_are_reported(cluster: Any) -> None:
    """As many workers as the cluster can have, but not on one node:
    what was asked, what is free, the largest node.
    """
    executor = RayExecutor(4, placement_strategy="STRICT_PACK", start_timeout_s=2)
    text = (
        r"asks for 4 x \{CPU: 1\} .* within 2 s .*free now: .*CPU: .* on one node, \{CPU: 4\}: the"
        r" largest node has \{CPU: 2\}"
    )
    with pytest.raises(ConfigError, match=text):
        executor.__enter__()


def test_growth_waits_for_the_first_ranks(ranks: RayExecutor) -> None:
    """The bundle of a third worker does not take the CPU that the first two wait for;
    two others of the four are in use.
    """
    options = options_of("launcher.", (2, 3))
    with connected(options):
        _until(
            lambda: ray.available_resources().get("CPU") == 2,
            "those of earlier tests are not given back",
        )
        held = placement_group([{"CPU": 1}])
        ray.get(held.ready(), timeout=60)
        slots = Slots(options)
        try:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert slots.ask() == {}
                time.sleep(0.5)
            remove_placement_group(held)
            _until(lambda: sum(slots.ask().values()) >= 2, "the first two have no places")
        finally:
            slots.close()
            remove_placement_group(held)


def _until(is_so: Callable[[], bool], fault: str) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, fault
        time.sleep(0.5)


def test_a_resource_that_no_node_has_is_refused(cluster: Any) -> None:
    """No autoscaler could bring it, and no node that joins does."""
    text = (
        r"RayExecutor\.resources_per_worker is \{CPU: 1, GPU: 1\}: GPU: 1 on one node, and .* 0\."
    )
    with (
        pytest.raises(ConfigError, match=f"{text} .*, or leave GPU out to train on CPUs"),
        RayExecutor(2, resources_per_worker={"CPU": 1, "GPU": 1}, start_timeout_s=2),
    ):
        pass


def test_a_wait_for_resources_is_printed(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """What it waits for, and what is free; the error after the time has it too."""
    with (
        pytest.raises(ConfigError, match="did not come within 3 s"),
        RayExecutor(9, start_timeout_s=3),
    ):
        pass
    text = capfd.readouterr().err
    assert text.count("RayExecutor waits for 9 x {CPU: 1} (PACK); free now: {") == 1
