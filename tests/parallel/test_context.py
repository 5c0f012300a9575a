"""Context parallel (engine=fsdp engine.context=2): ranks that share the tokens of each sample train
what one process does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launching import run_command
from tests.parallel.starts import ROOT, WORKERS, Results

STARTS: dict[str, tuple[int, dict[str, Any]]] = {  # name: ranks, options of engine=fsdp
    "single": (1, {}),
    "context": (2, {"context": 2}),
    "2 x context": (4, {"context": 2}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
}
SPLIT = [name for name in STARTS if name != "single"]
SCENARIOS = ["sgd", "adamw", "llama", "packed", "padded"]
CASES = [
    (start, scenario)
    for start in SPLIT
    for scenario in SCENARIOS
    # recipes/sft.py has no plan for tensor ranks
    if "tensor" not in STARTS[start][1] or scenario not in ("packed", "padded")
]

pytestmark = pytest.mark.parallel


class Runs(dict[tuple[str, str], Results]):
    """The results of a start, by (where its checkpoints come from, its name);
    "" for a start from nothing.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def out(self, source: str, start: str) -> Path:
        """The file of a start's results, beside the folders of its runs."""
        return self.folder / f"{source} to {start}".replace(" ", "_") / "out.pt"

    def __missing__(self, key: tuple[str, str]) -> Results:
        source, start = key
        ranks, options = STARTS[start]
        if source:
            _ = self["", source]
        out = self.out(source, start)
        out.parent.mkdir()
        begin = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python"
        engine = "fsdp" if ranks > 1 else "single"
        given = json.dumps(options).replace(" ", "")
        after = str(self.out("", source).parent) if source else "-"
        line = f"{begin} {WORKERS / 'context.py'} {out} {engine} '{given}' {after}"
        done = run_command(line, out.parent, timeout_s=240, PYTHONPATH=str(ROOT))
        assert done.code == 0, done.text
        self[key] = torch.load(out, weights_only=False)
        return self[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """See Runs."""
    return Runs(tmp_path_factory.mktemp("context"))


def compare(ranks: Any, expected: Any) -> None:
    """Weights, logged values and those of a validation are one process's, on each rank."""
    for rank in ranks:
        assert rank["state"].keys() == expected["state"].keys()
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=0, atol=1e-13)
        assert rank["values"] == pytest.approx(expected["values"], rel=1e-12)
        assert rank["validated"] == pytest.approx(expected["validated"], rel=1e-12)


@pytest.mark.parametrize(("start", "scenario"), CASES)
def test_they_train_as_one_process_does(start: str, scenario: str, runs: Runs) -> None:
    """GPT by plain SGD, and by AdamW with clipping, activation checkpointing, z-loss and logits of
    some tokens at a time; Llama with documents apart; chats of unequal length, in packed and padded
    rows. With accumulation, and a short last step.
    """
    (alone,) = runs["", "single"][scenario]
    compare(runs["", start][scenario], alone)


@pytest.mark.parametrize(("source", "start"), [("context", "single"), ("single", "2 x context")])
@pytest.mark.parametrize("scenario", ["sgd", "adamw"])
def test_checkpoints_resume_on_any_layout(
    source: str, start: str, scenario: str, runs: Runs
) -> None:
    """Of context ranks in one process, and of one process on context ranks."""
    (alone,) = runs["", "single"][scenario]
    compare(runs[source, start][scenario], alone["after"])


def test_each_rank_holds_a_part_of_the_weights(runs: Runs) -> None:
    """They are split over data ranks and context ranks."""
    (alone,) = runs["", "single"]["sgd"]
    for start, parts in (("context", 2), ("2 x context", 4)):
        assert sum(rank["held"] for rank in runs["", start]["sgd"]) == alone["held"]
        assert len(runs["", start]["sgd"]) == parts


@pytest.mark.parametrize("start", SPLIT)
def test_it_resumes_bit_for_bit_with_dropout(start: str, runs: Runs) -> None:
    """From the middle of an epoch."""
    for rank in runs["", start]["resumed"]:
        assert rank["whole"].keys() == rank["resumed"].keys()
        for name, value in rank["whole"].items():
            assert torch.equal(rank["resumed"][name], value), name


def test_ranks_of_a_group_read_the_same_and_draw_their_own(runs: Runs) -> None:
    """Before the cut they draw the same numbers; after it tensor ranks of the same tokens do."""
    seen = [rank["seen"] for rank in runs["", "2 x context"]["drawn"]]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    before, after = (
        [[each[place] for each in rank["drawn"]] for rank in runs["", "2 x context"]["drawn"]]
        for place in (0, 1)
    )
    assert before[0] == before[1] != before[2] == before[3]
    assert len({number for numbers in after for number in numbers}) == sum(map(len, after))
    of_tensor = [
        [each[1] for each in rank["drawn"]] for rank in runs["", "context x tensor"]["drawn"]
    ]
    assert of_tensor[0] == of_tensor[1] != of_tensor[2] == of_tensor[3]


@pytest.mark.parametrize("start", SPLIT)
def test_a_step_that_takes_no_part_has_whole_sequences(start: str, runs: Runs) -> None:
    """Each window is predicted once, as by one process."""
    (alone,) = runs["", "single"]["drawn"]
    assert len(alone["predicted"]) == 21
    for rank in runs["", start]["drawn"]:
        assert rank["predicted"] == alone["predicted"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("Whole", "training_step took no part of its sequence: each rank has computed all of it"),
        ("Apart", "but no layer called attention of trainkit.extensions.context.sequence"),
        ("Unsummed", "but no sum over its parts: its loss would be that of a rank's own tokens"),
        ("Mixed", "a layer has 16 tokens where training_step has taken its part, 8 tokens"),
        ("Late", "a sequence of 17 tokens after one of 16"),
        ("odd", "a sequence of 14 tokens, which cannot be cut into 4 chunks"),
    ],
)
def test_a_step_that_would_train_something_else_is_refused(
    case: str, text: str, runs: Runs
) -> None:
    """On all ranks, in its first step."""
    for rank in runs["", "context"]["refused"]:
        assert rank[case].startswith("engine.context is 2, and ")
        assert text in rank[case]
