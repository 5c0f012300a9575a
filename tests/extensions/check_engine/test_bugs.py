"""check-engine names the module of each seeded bug, and accuses no correct training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.extensions.check_engine import bugs
from tests.helpers.launching import run_command
from trainkit.extensions.check_engine.compare import Comparison, compare
from trainkit.extensions.check_engine.recording import EngineRecording

ROOT = Path(__file__).parents[3]
WORKER = Path(bugs.__file__)

pytestmark = pytest.mark.parallel

# bug -> the stage, the module or weight, and what its likeliest cause says
NAMED = {
    "forward sum": ("step 1 outputs", "down", "a sum (all-reduce) is missing in forward"),
    "norm's sum": ("step 1 gradients", "norm.bias", "not summed (all-reduced) over the tensor"),
    "mask": ("step 1 outputs", "mask", "a mask (dropout?): other elements are 0"),
    "offset": ("weights before step 1", "up.weight", "a wrong offset of a rank's part"),
    "untied": ("weights before step 1", "head.weight", "an untied weight: embedding.weight and"),
    "embedding": ("step 1 gradients", "embedding.weight", "no gradient arrives on the ranks"),
    "loss by ranks": ("step 1 outputs", "the loss", "it is 2 times that of one process on every"),
    "summed": ("step 1 gradients", "down.bias", "a sum over ranks where a mean belongs"),
    "averaged twice": ("step 1 gradients", "down.bias", "a mean over ranks where a sum belongs"),
    "accumulation": ("step 1 gradients", "down.bias", "a wrong divisor for accumulation"),
    "broadcast": ("weights before step 1", "down.weight", "rank 1 alone: a broadcast of rank 0"),
    "gradient's sum": ("step 1 gradients", "down.bias", "not summed (all-reduced) over ranks"),
    "rate": ("step 1 weights", "down.weight", "its gradient is equal, and the update is not"),
    "forgotten": ("step 1 weights", "up.weight", "no optimizer updates it on the ranks"),
    "own norm": ("step 1 clipped gradients", "down.bias", "a rank clips by another norm"),
    "batch norm": ("step 1 outputs", "scale", "takes statistics of a rank's own samples"),
    "buffer": ("step 1 buffers", "scale.square", "a buffer per rank: it is updated from a rank"),
}
CORRECT = [name for name in bugs.SEEDED if name.startswith("none")]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of all variants in one process, and of all bugs on two ranks: two starts."""
    folder = tmp_path_factory.mktemp("records")
    for line in (
        f"python {WORKER} {folder} single",
        f"torchrun --nproc-per-node 2 {WORKER} {folder} ranks",
    ):
        done = run_command(line, folder, timeout_s=300, PYTHONPATH=str(ROOT))
        assert done.code == 0, done.text
    return folder


def compared(records: Path, name: str) -> Comparison:
    """Return the comparison of a bug with one process."""
    variant = records / bugs.SEEDED[name].variant
    noisy = [EngineRecording.read(variant / f"disturbed-{i + 1}") for i in range(bugs.DISTURBED)]
    ranks = EngineRecording.read(records / "bugs" / name)
    return compare(EngineRecording.read(variant / "alone"), noisy, ranks, bugs.ERROR)


def test_each_bug_is_expected_somewhere() -> None:
    """The table has every bug of the worker, and there are enough of them."""
    assert {*NAMED} == {*bugs.SEEDED} - {*CORRECT}
    assert len(NAMED) > 15


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_training_is_equal(name: str, records: Path) -> None:
    """On each engine, with tensor groups, a mask that the ranks share, clipping, batch norm."""
    result = compared(records, name)
    assert result.first is None, result.first
    outputs = [stage for stage in result.stages if stage.what.endswith("outputs")]
    assert len(outputs) == bugs.STEPS
    assert all(stage.compared >= 8 and not stage.skipped for stage in outputs)
    assert all(stage.largest[0] < 1e-5 for stage in result.stages if not stage.is_noted)


@pytest.mark.parametrize("name", NAMED)
def test_a_bug_is_named_with_its_cause(name: str, records: Path) -> None:
    """The first module, weight or buffer that differs, and the likeliest cause."""
    first = compared(records, name).first
    assert first is not None
    stage, module, cause = NAMED[name]
    assert (first.stage, first.name) == (stage, module)
    assert cause in first.causes[0]
    assert first.relative > 500 * first.allowed


def test_batch_norm_of_each_rank_is_a_note(records: Path) -> None:
    """Its statistics differ, training does not: the note says what takes those of all ranks."""
    (note,) = compared(records, "none statistics").notes
    assert note.name == "batch_norm.running_mean"
    assert re.search("trainer.sync_batchnorm=true takes those of all ranks", note.causes[0])
    assert compared(records, "none sync").notes == []


def test_a_mask_that_ranks_draw_is_said_to_be_random(records: Path) -> None:
    """The function is named beside the mask."""
    result = compared(records, "mask")
    assert result.draws == {"mask": "rand"}
    assert result.first is not None
    assert any("mask draws random numbers (rand)" in cause for cause in result.first.causes)


def test_the_page_has_each_bug() -> None:
    """The table of docs/large_models.md has a row for each, with the module that is named."""
    text = (ROOT / "docs" / "large_models.md").read_text()
    table = text[text.index("| bug | first difference |") :].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == len(NAMED)
    for _, name, _ in NAMED.values():
        assert any(f"`{name}`" in row or name in row for row in rows), name
