"""The memory of a rank is what `plan` says, for each way to split a model."""

from __future__ import annotations

import pytest

from tests.helpers.toy import quiet
from tests.parallel.starts import WORKERS, Starts
from tests.parallel.workers.memory import LAYOUTS, make_data, make_task
from trainkit.extensions.plan import plan
from trainkit.extensions.plan.layouts import MeasuredRun, rank_bytes
from trainkit.extensions.plan.measured import Measuring
from trainkit.extensions.plan.simulated import SimulatedEngine
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.setup import Stage

LINE = f"torchrun --nproc-per-node 2 {WORKERS / 'memory.py'} {{out}}"

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """The worker on two ranks."""
    return Starts(lambda start: LINE, tmp_path_factory, timeout_s=240)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    """What a plan measures of the same model, in this process."""
    trainer = quiet(
        tmp_path_factory.mktemp("plan"), engine=SimulatedEngine("fsdp", 2, 2), max_steps=1
    )
    sources = DataSources({"train": make_data()})
    with Stage("fit", make_task(), sources, trainer.callbacks, trainer.options) as stage:
        run = build_run(stage, StartFrom())
        measuring = Measuring(run)
        measuring.measure([2], [2, 4], [2])
        plan.measure(run, {})
        return measuring.measured()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_what_plan_says(name: str, starts: Starts, planned: MeasuredRun) -> None:
    """The bytes of its parts of weights, gradients and optimizer state are equal, and with those of
    a step at its worst moment within 6 %. Rank 0 has the larger parts, and a pipeline's last
    stage.
    """
    expected = rank_bytes(planned, LAYOUTS[name])
    ranks = starts["all"][name]
    of_stages = ranks[: len(expected)][::-1]
    for own, plans in zip(of_stages, expected, strict=True):
        for part in ("weights", "gradients", "optimizer"):
            assert own[part] == getattr(plans, part), part
        most = own["weights"] + own["optimizer"] + own["step"]
        print(
            f"{name}: stage {plans.stage} {most / 1e6:.2f} MB, planned {plans.device / 1e6:.2f} MB"
        )
        assert plans.device == pytest.approx(most, rel=0.06)
