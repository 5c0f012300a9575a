"""Tensor groups (engine=fsdp engine.tensor=2):
their ranks read the same samples, and each sample counts once.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.launching import Command
from tests.parallel.starts import ROOT, WORKERS, Results, Starts

LINES = {
    "single": f"python {WORKERS / 'tensor.py'} {{out}} single '{{{{}}}}'",
    "2 x 2": (
        f"torchrun --nproc-per-node 4 {WORKERS / 'tensor.py'} {{out}} fsdp '{{{{\"tensor\":2}}}}'"
    ),
}

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """The worker in one process, and on two data ranks of two tensor ranks each."""
    return Starts(LINES.__getitem__, tmp_path_factory, timeout_s=240)


@pytest.fixture(scope="module")
def alone(starts: Starts) -> Results:
    """The results of one process."""
    return starts["single"]


@pytest.fixture(scope="module")
def ranks(starts: Starts) -> Results:
    """The results of four ranks."""
    return starts["2 x 2"]


@pytest.mark.parametrize("scenario", ["counted", "by_hand", "streamed", "recipes"])
def test_weights_are_those_of_one_process(scenario: str, alone: Results, ranks: Results) -> None:
    """With weighted samples and a short last step, by a plan or torch's parallelize_module;
    GPT, GPT-2 and BERT.
    """
    for rank in ranks[scenario]:
        for name, value in alone[scenario][0]["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scenario", ["counted", "streamed", "dropped"])
def test_the_ranks_of_a_group_read_the_same(scenario: str, ranks: Results) -> None:
    """And other groups read other samples; together each sample once an epoch."""
    seen = [rank["seen"] for rank in ranks[scenario]]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    if scenario != "streamed":  # there a rank without a batch borrows one, with weight 0
        epochs = 1 if scenario == "dropped" else 2
        assert sorted(n for rank in (seen[0], seen[2]) for batch in rank for n in batch) == sorted(
            [*range(21)] * epochs
        )


def test_values_count_each_sample_once(alone: Results, ranks: Results) -> None:
    """Means, sums over samples, and sums over ranks, which are data ranks."""
    expected = alone["counted"][0]["values"] | {"ranks": 2.0}
    assert expected["train/samples"] == expected["val/samples"] == 21
    for rank in ranks["counted"]:
        assert rank["values"] == pytest.approx(expected, rel=1e-12)


def test_each_sample_is_predicted_once(ranks: Results) -> None:
    """In memory and in files."""
    for rank in ranks["counted"]:
        assert rank["predicted"] == rank["written"] == list(range(21))


def test_the_contract_counts_data_ranks(ranks: Results) -> None:
    """Two ranks of 4 samples make a step of 8, at twice the rate."""
    for rank in ranks["scaled"]:
        assert (rank["contract"]["world_size"], rank["contract"]["batch_size"], rank["steps"]) == (
            2,
            4,
            3,
        )
        assert rank["lr"] == [0.1]


def test_operations_are_those_of_rank_0s_part(alone: Results, ranks: Results) -> None:
    """Of samples that two data ranks share: one layer of 6 x 6, whose inputs need no gradient, and
    half the width of a pair of 6 x 12 and 12 x 1.
    """
    first, pair = 2 * 2 * 36, 3 * 2 * (72 + 12)
    expected = {"alone": first + pair, "ranks": (first + pair / 2) / 2}
    for name, results in (("alone", alone), ("ranks", ranks)):
        counted, *others = [rank["operations"] for rank in results["scaled"]]
        assert counted and counted == pytest.approx([expected[name]] * len(counted))
        assert not any(others)


def test_dropout_is_equal_within_a_group(ranks: Results) -> None:
    """What all ranks of a group compute alike stays alike; other groups draw other numbers."""
    kept = [rank["kept"] for rank in ranks["dropped"]]
    assert kept[0] == kept[1] != kept[2] == kept[3]


def test_norms_are_those_of_one_process(alone: Results, ranks: Results) -> None:
    """Of gradients and updates, by layer;
    and a summary of layers, with a forward of its own, holds up no rank.
    """
    (expected, *_), (found, *others) = alone["watched"], ranks["watched"]
    assert len(expected["norms"]) == 3
    assert found["norms"] == [pytest.approx(values, rel=1e-12) for values in expected["norms"]]
    assert all(rank["norms"] == [] for rank in others)


def test_an_overflow_on_one_rank_holds_back_all_updates(ranks: Results) -> None:
    """The part of a gradient that one rank alone holds is infinite."""
    assert [rank["skipped"] for rank in ranks["overflowed"]] == [1, 1, 1, 1]
    assert all(rank["finite"] for rank in ranks["overflowed"])


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("no plan", "engine.tensor is 2, and no layer of NoPlan is split"),
        (
            "unknown name",
            "'upper', which is no module of Misnamed. Its layers are first, up, down.",
        ),
        ("width", "'down' has 1 outputs, which 2 ranks cannot share evenly"),
        ("tied", "splits a weight that two layers share (again.weight and up.weight)"),
        ("no layer", "has rowwise for 'dropout', which is a Dropout"),
        ("heads", "engine.tensor is 2; it must divide task.model.heads=3"),
        ("sharded", "train_dataloaders is trainkit.sharded(...), and the ranks are"),
        ("plan by config", "engine.tensor_plan names 'upper.*'"),
        ("ranks", "engine.tensor is 3, and there are 4 ranks; it must divide them."),
        (
            "groups",
            (
                "engine.replicas is 4 and engine.tensor is 2, and there are 4 ranks; their product,"
                " 8, must divide them."
            ),
        ),
        ("plan alone", "engine.tensor_plan is set, and engine.tensor is 1"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(case: str, part: str, ranks: Results) -> None:
    """Before the first step, with the names and the numbers."""
    for rank in ranks["refused"]:
        assert part in rank[case]


def test_the_banner_shows_the_groups(command: Command) -> None:
    """And a plan by config splits the layers that it names."""
    small = (
        "task.model.depth=1 task.model.width=16 task.model.heads=2 data.batch_size=2"
        " trainer.max_steps=2 callbacks=none"
    )
    plan = "'engine.tensor_plan={model.blocks.*.wide.0:colwise,model.blocks.*.wide.2:rowwise}'"
    done = command(
        f"torchrun --nproc-per-node 2 -m trainkit fit conf=gpt {small} engine=fsdp engine.tensor=2"
        f" {plan} logger=none trainer.limit_val_batches=0",
        timeout_s=300,
        PYTHONPATH=str(ROOT),
    )
    assert done.code == 0, done.text
    assert "fsdp, 2 ranks: 1 data x 2 tensor, cpu" in done.out
    assert "2 per data rank x 1 data rank x 1 accumulated = 2 samples" in done.out
