"""The comparison of two records: what is equal, what is too far for a comparison, what is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.toy import Line, Net, fill, loader, quiet
from trainkit.errors import ConfigError
from trainkit.extensions.check_engine.compare import Comparison, compare, facts_of
from trainkit.extensions.check_engine.recorder import EngineRecorder
from trainkit.extensions.check_engine.recording import EngineRecording
from trainkit.extensions.check_engine.report import report

ERROR = 2.0**-23
Record = Callable[..., EngineRecording]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A function that trains a Task in this process, and returns its record."""

    def run(make: Callable[[], Any] = Net, data: Any = None, steps: int = 2, **own: Any) -> Any:
        folder = tmp_path / f"record-{len(list(tmp_path.iterdir()))}"
        torch.manual_seed(0)
        recorder = EngineRecorder(str(folder), steps, **own)
        loaded = loader(16, 2) if data is None else data
        quiet(
            tmp_path / "run",
            max_steps=2,
            engine="single",
            global_batch_size=4,
            lr_scaling="none",
            callbacks=[recorder],
        ).fit(make(), loaded)
        return EngineRecording.read(folder)

    return run


def with_itself(record: Record, make: Callable[[], Any] = Net) -> Comparison:
    """Return the comparison of a run with itself, beside a disturbed one."""
    disturbed = [record(make, disturb=1, size=ERROR)]
    return compare(record(make), disturbed, record(make), ERROR)


def test_a_run_equals_itself(record: Record) -> None:
    """In each stage, with a bound that a rounding error has set; dropout was off."""
    result = with_itself(record)
    assert [stage.what for stage in result.stages][:3] == [
        "weights before step 1",
        "step 1 outputs",
        "step 1 gradients",
    ]
    assert all(stage.largest[0] == 0 for stage in result.stages)
    assert all(0 < stage.largest[1] < 1e-3 for stage in result.stages if stage.compared)
    assert result.dropout == ("model.3", "functions of torch")


def test_the_disturbed_run_is_within_its_bound(record: Record) -> None:
    """Another rounding error of the same size is no difference."""
    disturbed = [record(disturb=i, size=ERROR) for i in (1, 2)]
    other = record(disturb=3, size=ERROR)
    assert compare(record(), disturbed, other, ERROR).first is None


def in_stages(whole: EngineRecording, first: str) -> EngineRecording:
    """Return a record as the two stages of a pipeline leave it, the last one first by rank."""

    def part(record: dict[str, Any], is_last: bool) -> dict[str, Any]:
        def own(named: dict[str, Any]) -> dict[str, Any]:
            return {name: each for name, each in named.items() if name.startswith(first) != is_last}

        steps = [
            {
                **{kind: own(step[kind]) for kind in ("gradients", "used", "weights", "buffers")},
                "microbatches": [
                    {**each, "outputs": own(each["outputs"])} | ({} if is_last else {"loss": None})
                    for each in step["microbatches"]
                ],
            }
            for step in record["steps"]
        ]
        names = [*record["start"], *record["steps"][0]["buffers"]]
        elsewhere = [name for name in names if name.startswith(first) == is_last]
        parts = {"start": own(record["start"]), "steps": steps, "elsewhere": elsewhere}
        return {**record, **parts, "pipeline_size": 2}

    (record,) = whole.ranks
    return EngineRecording([part(dict(record), True), part(dict(record), False)])


def test_the_stages_of_a_pipeline_are_compared_as_one(record: Record) -> None:
    """Nothing is left out that the ranks have, each on its stage; a layer of the first stage that
    differs is named.
    """
    disturbed = [record(disturb=1, size=ERROR)]
    stages = in_stages(record(), "model.0")
    result = compare(record(), disturbed, stages, ERROR)
    whole = with_itself(record)
    assert [each.compared for each in result.stages] == [each.compared for each in whole.stages]
    assert result.first is None and all(not each.skipped for each in result.stages)
    stages.ranks[1]["steps"][0]["gradients"]["model.0.weight"].mul_(1.01)
    first = compare(record(), disturbed, stages, ERROR).first
    assert first is not None
    assert (first.stage, first.name) == ("step 1 gradients", "model.0.weight")


def test_stages_that_read_other_samples_are_refused(record: Record) -> None:
    """A model's ranks must read the same."""
    stages = in_stages(record(), "model.0")
    microbatch = stages.ranks[1]["steps"][0]["microbatches"][0]
    microbatch["samples"] = ["another", *microbatch["samples"][1:]]
    with pytest.raises(ConfigError, match=r"samples of step 1 differ between the ranks of a model"):
        compare(record(), [record(disturb=1, size=ERROR)], stages, ERROR)


def test_a_larger_error_is_a_difference(record: Record) -> None:
    """A thousand times that of rounding: seen in the first output."""
    disturbed = [record(disturb=i, size=ERROR) for i in (1, 2)]
    first = compare(record(), disturbed, record(disturb=3, size=1e4 * ERROR), ERROR).first
    assert first is not None
    assert (first.stage, first.name) == ("step 1 outputs", "model.0")


class Unseeded(Line):
    """Begins with other weights each time."""

    def make_model(self) -> nn.Module:
        """Return a model."""
        return nn.Linear(3, 1)

    def setup(self, stage: str) -> None:
        """Draw."""
        with torch.no_grad():
            generator = torch.Generator()
            generator.seed()
            self.model.weight.copy_(torch.randn(1, 3, generator=generator))


class Noisy(Line):
    """Draws noise of its own in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Add noise."""
        generator = torch.Generator()
        generator.seed()
        return self.model(x + torch.randn(x.shape, generator=generator))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unseeded, "begin with other weights, first in model.weight: .*seed_everything"),
        (Noisy, "apart after one forward: .*random numbers: training_step"),
    ],
)
def test_what_no_two_runs_repeat_is_not_compared(
    make: Callable[[], Any], message: str, record: Record
) -> None:
    """The message says that two runs of one process differ, and what to look at."""
    with pytest.raises(ConfigError, match=message):
        with_itself(record, make)


def test_other_samples_are_not_compared(record: Record) -> None:
    """The message counts them, and says which data can be compared."""
    other = record(data=loader(20, 2, shuffle=True))
    disturbed = [record(disturb=1, size=ERROR)]
    with pytest.raises(
        ConfigError, match="samples of step 1 are not those of one process: 4 there"
    ):
        compare(record(), disturbed, other, ERROR)


class Described(Line):
    """A module returns a text beside a number."""

    def make_model(self) -> nn.Module:
        """Return a layer and a module that describes."""

        class Describing(nn.Module):
            def forward(self, x: Tensor) -> str:
                return f"{len(x)} rows"

        return nn.ModuleDict({"line": nn.Linear(3, 1), "describe": Describing()})

    def forward(self, x: Tensor) -> Tensor:
        """Call both."""
        self.model["describe"](x)
        return self.model["line"](x)


def test_what_is_not_a_tensor_is_counted(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is compared, and the report says what is not."""
    facts: dict[str, Any] = {}
    assert report(with_itself(record, Described), "it", facts)
    text = " ".join(capsys.readouterr().out.split())
    assert "2 outputs, 1 skipped" in text
    assert "1 other skipped: model.describe (returns a str)." in text
    assert text.endswith("EQUAL: it trains as one process does.")
    assert facts["stages"][1]["skipped"] == {"model.describe": "returns a str"}


class Wide(Line):
    """The weights of its layer have two dimensions; dropout is left out."""

    def make_model(self) -> nn.Module:
        """Return two layers."""
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def test_a_screen_shows_the_first_difference_and_its_causes(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most 24 lines; nothing is compared after the step of the first difference."""

    class Halved(Wide):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2

    disturbed = [record(Wide, disturb=1, size=ERROR)]
    result = compare(record(Wide), disturbed, record(Halved), ERROR)
    assert not report(result, "conf=mine", {})
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert "FIRST DIFFERENCE: step 1 gradients: model.1.bias, by 0.5 of its size" in text
    assert "Likely cause: it is 0.5 times" in text
    assert "step 2" not in text
    assert not result.is_doubtful
    facts = facts_of(result)
    assert facts["first_difference"]["name"] == "model.1.bias"
    assert not facts["equal"]


def test_a_small_difference_is_doubtful(record: Record) -> None:
    """It may be a kink that a rounding error has passed: the command runs again in float64."""
    result = with_itself(record)
    assert not result.is_doubtful
    disturbed = [record(disturb=1, size=ERROR)]
    far = compare(record(), disturbed, record(disturb=3, size=1e-3), ERROR)
    assert far.is_doubtful
    assert far.first is not None
    first = replace(far.first, relative=0.5)
    stages = tuple(replace(stage, first=stage.first and first) for stage in far.stages)
    assert not replace(far, stages=stages).is_doubtful


def test_a_users_own_tensors_are_read_again(record: Record) -> None:
    """A list of batches, one of them twice, has the same samples in a disturbed run."""
    batches = [tuple(loader(4, 4).dataset.tensors)] * 2
    before = [each.clone() for each in batches[0]]
    runs = [record(data=batches, disturb=number, size=1e-2 * number) for number in (0, 1)]
    assert [run.samples(0) for run in runs] == [runs[0].samples(0)] * 2
    assert all(torch.equal(a, b) for a, b in zip(batches[0], before, strict=True))


def test_tied_weights_have_one_gradient(record: Record) -> None:
    """And their names are those of both layers."""

    class Tied(Line):
        def make_model(self) -> nn.Module:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
            fill(model)
            model[1].weight = model[0].weight
            return model

    assert record(Tied).first["tied"] == [["model.0.weight", "model.1.weight"]]
    assert with_itself(record, Tied).first is None
