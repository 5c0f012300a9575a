"""Where the layers of a Task are cut into stages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.errors import ConfigError
from trainkit.extensions.pipeline.schedule import INTERLEAVED, StageSchedule
from trainkit.extensions.pipeline.stages import idle_share, stage_rows
from trainkit.extensions.pipeline.units import units_of
from trainkit.extensions.pipeline.work import UnitWork


class Block(nn.Module):
    """A layer of a width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)


class Chain(nn.Module):
    """A large embedding, blocks of given widths, dropout, and a head."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4)
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.dropout = nn.Dropout()
        self.head = nn.Linear(4, 2)


def stages_of(task: nn.Module, stages: int) -> list[list[str]]:
    """The names of each stage's units."""
    units = units_of(task, stages)
    return [[unit.name for unit in units if unit.stage == stage] for stage in range(stages)]


def test_stages_have_about_as_much_work() -> None:
    """An embedding counts nothing; a stage begins with a block; modules without weights are none."""
    assert stages_of(Chain(8, 8, 8, 8), 2) == [
        ["table", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "head"],
    ]
    assert stages_of(Chain(40, 8, 8, 8), 2)[0] == ["table", "blocks.0"]
    assert stages_of(Chain(8, 8, 8), 3) == [
        ["table", "blocks.0"],
        ["blocks.1"],
        ["blocks.2", "head"],
    ]


def test_fewer_blocks_than_stages_are_refused() -> None:
    """The error has both numbers, and the way out."""
    text = r"engine.pipeline is 3, and Chain has 2 blocks .* pipeline_stages\(\)"
    with pytest.raises(ConfigError, match=text):
        units_of(Chain(8, 8), 3)


def test_fewer_blocks_than_chunks_are_refused() -> None:
    """With the product, and what else to set."""
    text = (
        r"engine.pipeline is 2 and engine.pipeline_chunks is 2: 4 stages, and Chain has 3 blocks"
        r" .*pipeline_schedule=1f1b"
    )
    with pytest.raises(ConfigError, match=text):
        units_of(Chain(8, 8, 8), 2, chunks=2)


class Named(Chain):
    """Names its stages."""

    stages: Any = None

    def pipeline_stages(self) -> Any:
        """Return them."""
        return self.stages


def test_a_task_names_its_stages() -> None:
    """A stage is a list of modules, or a module that holds them."""
    task = Named(8, 8, 8)
    task.stages = [task.table, [task.blocks, task.head]]
    assert stages_of(task, 2) == [["table"], ["blocks.0", "blocks.1", "blocks.2", "head"]]


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (lambda task: [[task.table, task.blocks]], "returned 1 stages. It must return a list"),
        (lambda task: 5, "returned 5 stages. It must return a list"),
        (lambda task: [task.table, task.blocks], "leaves out 'head', which has weights"),
    ],
    ids=["one stage", "no list", "left out"],
)
def test_stages_that_do_not_fit_are_refused(stages: Any, text: str) -> None:
    """Another number than engine.pipeline's, and modules that none names."""
    task = Named(8, 8, 8)
    task.stages = stages(task)
    with pytest.raises(ConfigError, match=re.escape(text)):
        units_of(task, 2)


def test_a_plan_shows_stages_and_waiting() -> None:
    """The ranks, layers, weights and work of each, and the bubble of few microbatches."""
    rows = dict(stage_rows(Chain(8, 8, 8, 8), StageSchedule("1f1b", 2), 1, 2))
    assert rows["stage 0, ranks 2 to 3"] == (
        "table to blocks.1: weights 15.9 KiB, 47% of what is multiplied"
    )
    assert rows["stage 1, ranks 0 to 1"].startswith("blocks.2 to head: ")
    assert rows["waiting"] == (
        "50% of a step, with 1 microbatches on 2 stages of work up to 6% above the mean;"
        " trainer.accumulate_grad_batches=8 would leave 15%"
    )
    counted = UnitWork([0, 5, 5, 10], [0, 0, 64, 0])
    rows = dict(stage_rows(Chain(8, 8), StageSchedule("1f1b", 2), 8, 1, counted, 4, [1024, 2048]))
    assert rows["stage 0, rank 1"] == (
        "table to blocks.0: weights 15.8 KiB, 25% of what is multiplied, 1.0 KiB in a step"
        " (activations, gradients, gathered weights)"
    )
    assert rows["stage 1, rank 0"].endswith(
        "; takes 256 B of each microbatch, and sends its gradients back"
    )
    assert rows["waiting"].endswith(
        "with 8 microbatches on 2 stages of work up to 50% above the mean"
    )


def test_a_plan_lists_the_stages_of_each_rank() -> None:
    """In turn over ranks; the bytes of a step are a rank's, at its first stage."""
    schedule = StageSchedule(INTERLEAVED, 2, 2)
    rows = dict(stage_rows(Chain(8, 8, 8, 8), schedule, 4, 1, None, 1, [1024, 2048]))
    names = [name for name in rows if name.startswith("stage")]
    assert names == ["stage 0, rank 1", "stage 1, rank 0", "stage 2, rank 1", "stage 3, rank 0"]
    assert "1.0 KiB in a step with its other stages" in rows["stage 0, rank 1"]
    assert "in a step" not in rows["stage 2, rank 1"]
    assert rows["waiting"].startswith("15% of a step, with 4 microbatches on 4 stages (2 on each")


def test_interleaved_stages_wait_less() -> None:
    """(P - 1) / (C x M + P - 1) of a step, if all have as much work."""
    for ranks, chunks in ((2, 2), (4, 2), (3, 4)):
        own = StageSchedule(INTERLEAVED, ranks, chunks)
        for microbatches in (ranks, 3 * ranks):
            share = idle_share([5] * own.stages, microbatches, own)
            expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
            assert share == pytest.approx(expected)


def test_ranks_of_uneven_stages_wait_longer() -> None:
    """A step is the work of all stages, and that of the largest for each further microbatch."""
    assert idle_share([1, 1], 1) == 0.5
    assert idle_share([1, 1, 1, 1], 5) == pytest.approx(3 / 8)
    assert idle_share([1, 3], 8) == pytest.approx(1 - 8 * 4 / (2 * (4 + 7 * 3)))


def test_a_norm_that_tracks_statistics_is_a_unit_without_weights_too() -> None:
    """On one stage, which sends them; other buffers are on all."""
    task = nn.Module()
    task.norm = nn.BatchNorm1d(4, affine=False)
    task.blocks = nn.ModuleList([Block(4), Block(4)])
    task.between = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.ReLU())
    task.untracked = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    task.table = nn.Module()
    task.table.register_buffer("angles", torch.ones(4))
    assert stages_of(task, 2) == [["norm", "blocks.0"], ["blocks.1", "between"]]
    task.pipeline_stages = lambda: [[task.blocks[0]], [task.blocks[1], task.between]]
    with pytest.raises(ConfigError, match=r"leaves out 'norm', which has statistics\. Add it"):
        units_of(task, 2)


def test_the_parts_of_a_model_that_lists_hold_are_units_in_order() -> None:
    """Blocks of several lists, as the groups of a ResNet."""
    task = nn.Module()
    task.stem = nn.Linear(4, 4)
    task.low = nn.Sequential(Block(4), Block(4))
    task.high = nn.Sequential(Block(8), Block(8))
    task.scale = nn.Parameter(torch.ones(()))
    assert stages_of(task, 2) == [["stem", "low.0", "low.1"], ["high.0", "high.1"]]
