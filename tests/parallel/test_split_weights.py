"""Ranks that hold parts of the weights (engine=fsdp) train as one process does,
and resume what any engine has saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launching import Command, run_command
from tests.parallel.starts import ROOT, WORKERS, Results

INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b"}
STARTS: dict[str, tuple[int, str, dict[str, Any]]] = {  # name: ranks, engine, its options
    "single": (1, "single", {}),
    "ddp, 2 ranks": (2, "ddp", {}),
    "fsdp, 1 rank": (1, "fsdp", {}),
    "fsdp, 2 ranks": (2, "fsdp", {}),
    "fsdp, 3 ranks": (3, "fsdp", {"shard": ["Block"]}),
    "2 x 2 ranks": (4, "fsdp", {"replicas": 2}),
    "offloaded": (2, "fsdp", {"cpu_offload": True}),
    "gathered once": (2, "fsdp", {"reshard_after_forward": False}),
    "tensor": (2, "fsdp", {"tensor": 2}),
    "2 x tensor": (4, "fsdp", {"tensor": 2, "shard": ["Block"]}),
    "2 replicas x tensor": (4, "fsdp", {"replicas": 2, "tensor": 2}),
    "pipeline": (2, "fsdp", {"pipeline": 2}),
    "2 x pipeline": (4, "fsdp", {"pipeline": 2, **INTERLEAVED}),
    "2 replicas x pipeline": (4, "fsdp", {"pipeline": 2, "replicas": 2, **INTERLEAVED}),
    "pipeline x tensor": (4, "fsdp", {"pipeline": 2, "tensor": 2}),
}
SPLIT = [name for name, (_, engine, _) in STARTS.items() if engine == "fsdp"]
GOES_ON = [
    ("fsdp, 2 ranks", "fsdp, 3 ranks"),
    ("fsdp, 3 ranks", "single"),
    ("ddp, 2 ranks", "fsdp, 2 ranks"),
    ("single", "2 x 2 ranks"),
    ("2 x tensor", "single"),
    ("ddp, 2 ranks", "2 x tensor"),
    ("fsdp, 3 ranks", "tensor"),
    ("2 x 2 ranks", "ddp, 2 ranks"),
    ("2 x tensor", "fsdp, 3 ranks"),
    ("tensor", "ddp, 2 ranks"),
    ("tensor", "2 replicas x tensor"),
    ("pipeline", "single"),
    ("2 x pipeline", "fsdp, 2 ranks"),
    ("single", "pipeline x tensor"),
    ("ddp, 2 ranks", "pipeline"),
    ("pipeline x tensor", "2 replicas x pipeline"),
]
MICROBATCHES = 2  # of a step
SCENARIOS = ["sgd", "adamw", "late", "several", "averaged", "experts", "loop"]

PARTED = [*SPLIT, "ddp, 2 ranks"]

pytestmark = pytest.mark.parallel


def trained_in(start: str) -> list[str]:
    """Return the scenarios that a start trains. One whose layout only changes the memory or the
    replicas of another has SGD's and AdamW's, and every third of the others.
    """
    shared = ["fsdp, 1 rank", "offloaded", "gathered once"]
    shared += ["2 replicas x tensor", "2 replicas x pipeline"]
    return [
        name
        for place, name in enumerate(SCENARIOS)
        if has_case(name, start)
        and (start not in shared or place < 2 or (place + shared.index(start)) % 3 == 0)
    ]


def has_case(scenario: str, *starts: str) -> bool:
    """Return whether a scenario runs in all of these starts: experts have no pipeline, and a loop of
    one's own has no plan for tensor ranks either.
    """
    never = {"experts": ("pipeline",), "loop": ("pipeline", "tensor")}.get(scenario, ())
    return not any(word in start for start in starts for word in never)


def resumed_in(source: str, start: str) -> list[str]:
    """Return the scenarios that resume so: AdamW's in each pair of starts, each other one in every
    third of them.
    """
    number = GOES_ON.index((source, start))
    return [
        name
        for place, name in enumerate(SCENARIOS)
        if name == "adamw" or ((place + number) % 3 == 0 and has_case(name, source, start))
    ]


class Runs(dict[tuple[str, str], Results]):
    """The results of a start, by (where its checkpoints come from, its name);
    "" for a start from nothing.
    """

    def __init__(self, folder: Path, scenarios: list[str]) -> None:
        super().__init__()
        self.folder, self.scenarios = folder, scenarios

    def out(self, source: str, start: str) -> Path:
        """The file of a start's results, beside the folders of its runs."""
        return self.folder / f"{source} to {start}".replace(" ", "_").replace(",", "") / "out.pt"

    def __missing__(self, key: tuple[str, str]) -> Results:
        source, start = key
        ranks, engine, options = STARTS[start]
        if source:
            _ = self["", source]
        out = self.out(source, start)
        out.parent.mkdir()
        begin = f"torchrun --nproc-per-node {ranks}" if engine != "single" else "python"
        given = json.dumps(options).replace(" ", "")
        after = str(self.out("", source).parent) if source else "-"
        line = f"{begin} {WORKERS / 'split.py'} {out} {engine} '{given}' {after}"
        own = resumed_in(source, start) if (source, start) in GOES_ON else trained_in(start)
        chosen = [name for name in own if name in self.scenarios]
        line += f" {','.join(chosen)}"
        done = run_command(line, out.parent, PYTHONPATH=str(ROOT))
        assert done.code == 0, done.text
        self[key] = torch.load(out, weights_only=False)
        return self[key]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """See Runs; of the scenarios, those that the chosen tests look at."""
    chosen = [item for item in request.session.items if item.path == request.path]
    names = {getattr(item, "originalname", "") for item in chosen}
    if names != {test_they_train_as_one_process_does.__name__}:
        return Runs(tmp_path_factory.mktemp("split"), SCENARIOS)
    asked = {item.callspec.params["scenario"] for item in chosen}  # type: ignore[attr-defined]
    return Runs(tmp_path_factory.mktemp("split"), [name for name in SCENARIOS if name in asked])


def stages_of(start: str) -> int:
    """The pipeline stages of a start."""
    stages: int = STARTS[start][2].get("pipeline", 1)
    return stages


def compare(ranks: Any, expected: Any, stages: int = 1) -> None:
    """Weights, buffers and the value of a validation are those of one process;
    each rank has all of them, or those of its pipeline stage.
    """
    names = [frozenset(rank["state"]) for rank in ranks]
    assert frozenset().union(*names) == set(expected["state"])
    assert len(set(names)) == stages
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=0, atol=1e-13)
        assert rank["value"] == pytest.approx(expected["value"], rel=1e-12)


@pytest.mark.parametrize(
    ("scenario", "start"), [(name, start) for start in PARTED for name in trained_in(start)]
)
def test_they_train_as_one_process_does(start: str, scenario: str, runs: Runs) -> None:
    """Plain SGD, clipped AdamW with activation checkpointing, layers of configure_model with EMA,
    one of LARS, LAMB, Muon, Adafactor and AdEMAMix for each part of the layers, averages in place
    of a schedule, experts that clip by a hook, and a loop of one's own; short steps.
    """
    (alone,) = runs["", "single"][scenario]
    compare(runs["", start][scenario], alone, stages_of(start))


@pytest.mark.parametrize("start", ["fsdp, 2 ranks", "gathered once", "pipeline"])
def test_weights_are_gathered_for_a_microbatch_or_a_step(start: str, runs: Runs) -> None:
    """With `reshard_after_forward=False` microbatches after a step's first one have the weights of
    blocks; of the next step they are gathered again. A stage without data ranks has them always.
    """
    expected = [stages_of(start) > 1, *[start != "fsdp, 2 ranks"] * (MICROBATCHES - 1)]
    for rank in runs["", start]["sgd"]:
        assert rank["gathered"][: 2 * MICROBATCHES] == 2 * expected


@pytest.mark.parametrize("start", SPLIT)
def test_each_holds_its_part(start: str, runs: Runs) -> None:
    """Together the ranks of a group hold the weights once;
    what no plan splits by width, once for each tensor rank.
    """
    held = [rank["held"] for rank in runs["", start]["sgd"]]
    groups, tensor = (STARTS[start][2].get(name, 1) for name in ("replicas", "tensor"))
    stages = stages_of(start)
    (alone,) = runs["", "single"]["sgd"]
    # of four blocks: the wide layers, but for the bias after the sum
    by_width = 4 * (2 * 63 * 126 + 126)
    # the weight of the first and the last layer is on each stage
    of_all = alone["held"] + 6 * 63 * (stages - 1)
    assert sum(held) == groups * (by_width + tensor * (of_all - by_width))
    assert max(held) < 1.1 * alone["held"] * groups / len(held)


@pytest.mark.parametrize("start", [*SPLIT, "ddp, 2 ranks"])
def test_no_thread_of_a_group_lives_to_the_end(start: str, runs: Runs) -> None:
    """One that still frees a tensor while the interpreter ends would abort the process."""
    _ = runs["", start]
    threads = [path.read_text() for path in runs.out("", start).parent.glob("threads_of_rank_*")]
    assert len(threads) == STARTS[start][0] and "python" in threads[0]
    assert not [names for names in threads if "gloo" in names]


@pytest.mark.parametrize(
    ("scenario", "source", "start"),
    [(name, *pair) for pair in GOES_ON for name in resumed_in(*pair)],
)
def test_a_checkpoint_resumes_at_any_engine_and_number_of_ranks(
    source: str, start: str, scenario: str, runs: Runs
) -> None:
    """Weights, optimizer state and averages are those of the run that never changed."""
    (alone,) = runs["single", "single"][scenario]
    compare(runs[source, start][scenario], alone, stages_of(start))


def test_each_rank_writes_its_own_file(runs: Runs) -> None:
    """No rank gathers the model; nothing in the folder is pickled
    but plain values and small tensors.
    """
    _ = runs["", "fsdp, 2 ranks"]
    folder = runs.out("", "fsdp, 2 ranks").parent / "adamw" / "checkpoints" / "last"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(sizes) == {
        "manifest.json",
        "training.pt",
        "rank-0-of-2.safetensors",
        "rank-1-of-2.safetensors",
    }
    weights = 8 * runs["", "single"]["adamw"][0]["held"]
    # and two moments
    assert all(
        1.4 * weights < sizes[f"rank-{rank}-of-2.safetensors"] < 1.7 * weights for rank in range(2)
    )


LOST = """
import os

from tests.helpers.toy import Line, loader, quiet
from trainkit.cli.guard import fail
from trainkit.errors import TrainkitError
from trainkit.launch.environment import read_launcher


class Ends(Line):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2 and self.trainer.global_rank == 1:
            os._exit(3)
        return super().training_step(batch, batch_idx)


try:
    quiet("run", engine="fsdp", max_epochs=3).fit(Ends(), loader(64))
except TrainkitError as error:
    raise SystemExit(fail(error, read_launcher(), str(error), 1))
"""


def test_a_lost_rank_is_named_as_the_cause(command: Command, tmp_path: Path) -> None:
    """The others report in a line that a rank has ended,
    in place of the traceback of a gather inside their forward.
    """
    (tmp_path / "lost.py").write_text(LOST)
    # By default torchrun looks every 0.1 s, and may send SIGTERM before the other rank has said
    # anything.
    done = command(
        "torchrun --nproc-per-node 2 --monitor-interval 5 lost.py",
        timeout_s=300,
        PYTHONPATH=str(ROOT),
    )
    assert done.code != 0
    assert done.text.count("Another rank ended") == 1, done.text
    assert "trainkit/loop.py" not in done.text


FULL = """
import os
from pathlib import Path

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.store import LocalStore


def on_a_full_disk(store, name, part):
    return Path(__file__) / "no folder" if name == "step=2" else draft(store, name, part)


draft = LocalStore._draft
if os.environ["RANK"] == "1":
    LocalStore._draft = on_a_full_disk
policy = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}")
quiet("run", engine="fsdp", max_steps=4, callbacks=policy).fit(Line(), loader(64))
"""


def test_a_rank_that_can_write_nothing_costs_a_checkpoint(command: Command, tmp_path: Path) -> None:
    """Not even a report: rank 0 gets it over the group, says so at once,
    and training and later checkpoints continue.
    """
    (tmp_path / "full.py").write_text(FULL)
    done = command("torchrun --nproc-per-node 2 full.py", timeout_s=300, PYTHONPATH=str(ROOT))
    assert done.code == 0, done.text
    assert (
        done.text.count("step=2 was NOT written: rank 1: ") == 1 and "Not a directory" in done.text
    ), done.text
    assert {path.name for path in (tmp_path / "run/checkpoints").glob("step=*")} == {
        "step=1",
        "step=3",
        "step=4",
    }
