"""Pipelines (engine=fsdp engine.pipeline=2): stages of the layers on different ranks train what one
process does, and read the same samples, which count once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.helpers.launching import Command
from tests.parallel.starts import ROOT, WORKERS, Starts

WORKER = WORKERS / "pipeline.py"
LINES = {
    "single": f"python {WORKER} {{out}} single '{{{{}}}}'",
    "1f1b": f"torchrun --nproc-per-node 4 {WORKER} {{out}} fsdp '{{{{\"pipeline\":2}}}}'",
    "4 stages": (
        f"torchrun --nproc-per-node 4 {WORKER} {{out}} fsdp"
        ' \'{{"pipeline":4,"pipeline_schedule":"gpipe"}}\''
    ),
}
# the ranks of 1f1b train both ways, one after the other
SPLIT = ["1f1b", "interleaved_1f1b", "4 stages"]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """The worker in one process, and on four ranks."""
    return Starts(LINES.__getitem__, tmp_path_factory, timeout_s=480)


def results_of(starts: Starts, start: str) -> Any:
    """The results of each scenario, by rank."""
    return starts["1f1b"][start] if start == "interleaved_1f1b" else starts[start]


@pytest.mark.parametrize("start", SPLIT)
def test_weights_are_those_of_one_process(start: str, starts: Starts) -> None:
    """With weighted samples, a short last step, clipping, two tensors that are handed on, and a
    weight of the Task itself. Two of the models' ranks have three microbatches.
    """
    expected = starts["single"]["counted"][0]["state"]
    ranks = results_of(starts, start)["counted"]
    weights = {name for name in expected if not name.endswith(".calls")}
    assert {name for rank in ranks for name in rank["state"]} >= weights
    for rank in ranks:
        for name in weights & set(rank["state"]):
            torch.testing.assert_close(rank["state"][name], expected[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("start", SPLIT)
def test_masks_of_a_batch_are_there_on_each_stage(start: str, starts: Starts) -> None:
    """BERT with padding: its blocks take a mask beside what the stage before hands on, and its head
    has the weight of the embedding.
    """
    expected = starts["single"]["masked"][0]
    ranks = results_of(starts, start)["masked"]
    assert {name for rank in ranks for name in rank["state"]} == set(expected["state"])
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=0, atol=1e-12)
    assert ranks[0]["values"] == pytest.approx(expected["values"], rel=1e-12)


def test_statistics_and_their_averages_are_those_of_one_process(starts: Starts) -> None:
    """With EMA, on four stages of one model, after a checkpoint; of batch norms in another stage
    than rank 0's, with weights and without.
    """
    expected = starts["single"]["normed"][0]
    ranks = starts["4 stages"]["normed"]
    assert {name for rank in ranks for name in rank["state"]} == set(expected["state"])
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=0, atol=1e-10, msg=name)
    assert ranks[0]["values"] == pytest.approx(expected["values"], rel=1e-9)


@pytest.mark.parametrize(("start", "batches"), [*zip(SPLIT, (12, 12, 24), strict=True)])
def test_a_norm_counts_the_batches_of_its_stage(start: str, batches: int, starts: Starts) -> None:
    """Those of one data rank, in two epochs."""
    for rank in results_of(starts, start)["normed"]:
        for name in ("norm", "plain"):
            assert rank["state"][f"{name}.num_batches_tracked"] == batches


def test_a_weight_without_gradient_is_left_alone(starts: Starts) -> None:
    """By AdamW, whose decay moves it otherwise, as it does a weight that FSDP2 has split."""
    for rank in starts["4 stages"]["normed"]:
        assert rank["state"]["unused"].tolist() == [1.0] * 3


@pytest.mark.parametrize("start", SPLIT)
def test_each_sample_counts_once(start: str, starts: Starts) -> None:
    """Logged means and sums, and predictions with their values, in order."""
    alone, first = starts["single"]["counted"][0], results_of(starts, start)["counted"][0]
    assert first["values"] == pytest.approx(alone["values"], rel=1e-12)
    assert first["values"]["train/samples"] == first["values"]["val/samples"] == 27
    assert [number for number, _ in first["predicted"]] == list(range(27))
    for (_, value), (_, of_one) in zip(first["predicted"], alone["predicted"], strict=True):
        assert value == pytest.approx(of_one, rel=1e-12)


def test_the_stages_of_a_model_read_and_draw_the_same(starts: Starts) -> None:
    """Ranks 0 and 1 are one model's stages, 2 and 3 the other's; numbers that a step draws outside
    of layers are equal on stages, and other ones on other data ranks.
    """
    ranks = starts["1f1b"]["counted"]
    for name in ("seen", "drawn"):
        values = [rank[name] for rank in ranks]
        assert values[0] == values[1] != values[2] == values[3]


@pytest.mark.parametrize(
    ("start", "blocks", "ranks"), [*zip(SPLIT, (2, 2, 1), (2, 2, 1), strict=True)]
)
def test_operations_are_those_of_rank_0s_layers(
    start: str, blocks: int, ranks: int, starts: Starts
) -> None:
    """Forward and backward of its blocks of 6 x 6 and the head, of samples that data ranks share;
    the shapes of other layers compute nothing.
    """
    counted, *others = [rank["operations"] for rank in results_of(starts, start)["measured"]]
    expected = 3 * 2 * (36 * blocks + 6) / ranks
    assert counted and counted == pytest.approx([expected] * len(counted))
    assert not any(others)


@pytest.mark.parametrize("start", SPLIT)
def test_it_resumes_bit_for_bit_with_dropout(start: str, starts: Starts) -> None:
    """From the middle of an epoch."""
    for rank in results_of(starts, start)["resumed"]:
        assert rank["whole"].keys() == rank["resumed"].keys()
        for name, value in rank["whole"].items():
            assert torch.equal(rank["resumed"][name], value), name


@pytest.mark.parametrize(
    ("case", "options", "text"),
    [
        ("Skips", {}, "returned None to skip a batch, which earlier pipeline stages have computed"),
        ("Beside", {}, "returned what the last pipeline stage does not have"),
        ("Early", {}, "ended before the layers of pipeline stage"),
        ("Chain", {"reshard_after_forward": True}, "is on one rank alone, which gathers nothing"),
    ],
)
def test_what_no_pipeline_can_train_is_refused(
    case: str, options: dict[str, Any], text: str, command: Command
) -> None:
    """In the first step, by the rank that lacks something; no rank is left."""
    given = json.dumps({"pipeline": 2, **options}).replace(" ", "")
    done = command(
        f"torchrun --nproc-per-node 2 {WORKER} out.pt fsdp '{given}' {case}",
        timeout_s=120,
        PYTHONPATH=str(ROOT),
    )
    assert done.code != 0
    assert text in done.text
