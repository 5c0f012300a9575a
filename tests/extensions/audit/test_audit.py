"""Audit: what is compared, who is wrong, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import Audit
from trainkit.errors import ConfigError, DivergenceError
from trainkit.extensions.audit.values import Fingerprints, Value, bounds_of, first_difference
from trainkit.extensions.audit.verdict import Verdict, judge


def values(*sizes: float) -> list[Value]:
    """Values a, b, ... of these sizes, whose bits follow from the size."""
    return [Value("abc"[i], (hash(size), 0), size) for i, size in enumerate(sizes)]


def exact(a: Any, b: Any) -> str | None:
    """All bits must agree."""
    return first_difference(a, b, None)


RIGHT, WRONG = values(1.0, 2.0), values(1.0, 3.0)


@pytest.mark.parametrize(
    ("original", "again", "expected"),
    [
        (RIGHT, [RIGHT, RIGHT, RIGHT], None),
        (RIGHT, [RIGHT], None),
        (WRONG, [RIGHT], Verdict((0,), "b", decided=True, repeats=False)),
        (WRONG, [WRONG, RIGHT, RIGHT], Verdict((0,), "b", decided=True, repeats=True)),
        (WRONG, [RIGHT, RIGHT], Verdict((0,), "b", decided=True, repeats=False)),
        (RIGHT, [RIGHT, RIGHT, WRONG], Verdict((2,), "b", decided=True, repeats=True)),
        (RIGHT, [RIGHT, WRONG, RIGHT, RIGHT], Verdict((1,), "b", decided=True, repeats=True)),
        (RIGHT, [WRONG, RIGHT], Verdict((0,), "b", decided=True, repeats=False)),
        (RIGHT, [RIGHT, WRONG], Verdict((0, 1), "b", decided=False, repeats=True)),
    ],
)
def test_most_ranks_or_the_recorded_step_decide(
    original: list[Value], again: list[list[Value]], expected: Verdict | None
) -> None:
    """Rank 0 is the audited one."""
    assert judge(original, again, 0, exact) == expected


def test_differences_within_the_bounds_of_the_device_are_none() -> None:
    """Ten times the scatter of repeated runs; of what never scatters, 1e-6."""
    bounds = bounds_of([values(1.0, 2.0), values(1.0, 2.0002)])
    assert first_difference(values(1.0, 2.0), values(1.0, 2.001), bounds) is None
    assert first_difference(values(1.0, 2.0), values(1.0, 2.01), bounds) == "b"
    assert first_difference(values(1.0), values(1.00001), bounds) == "a"
    assert first_difference(values(1.0), values(float("nan")), bounds) == "a"
    assert "the number of modules (1 or 2" in str(first_difference(values(1), values(1, 2), None))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_single_bit_shows(dtype: torch.dtype) -> None:
    """Of any dtype, in the last element, whatever its size."""
    tensor = torch.ones(3, 5).to(dtype)
    other = tensor.clone()
    other.view(-1).view(torch.uint8)[-1] ^= 1
    one, two = Fingerprints(with_sizes=False), Fingerprints(with_sizes=False)
    one.add("x", tensor)
    two.add("x", other)
    assert first_difference(one.read(), one.read(), None) is None
    assert first_difference(one.read(), two.read(), None) == "x"


def test_a_lone_rank_detects_what_it_cannot_repeat(tmp_path: Path) -> None:
    """The step, the module and the last agreement are named, and nothing stays on the task."""

    class Once(Callback):
        """Changes one output of the third step."""

        def on_train_step_start(self, trainer: Any, task: Any) -> None:
            """Add 1 to the next output, once."""
            if trainer.global_step == 2:
                handle = task.model[0].register_forward_hook(
                    lambda module, args, output: (handle.remove(), output + 1)[1]
                )

    task = Net()
    with pytest.raises(DivergenceError, match=r"step 3: rank 0 .* the output of model.0; all") as e:
        quiet(tmp_path, callbacks=[Once(), Audit(every_n_steps=1)]).fit(task, loader(16))
    assert "all ranks agreed at step 2. It was once" in str(e.value)
    assert "training_step" not in vars(task)
    assert not task.model[0]._forward_hooks


def test_an_audit_changes_nothing(tmp_path: Path) -> None:
    """The weights are those of a fit without it; random numbers continue as they were."""
    ends = []
    for callbacks in ([], [Audit(every_n_steps=1)]):
        torch.manual_seed(3)
        task = Net()
        quiet(tmp_path, callbacks=list(callbacks)).fit(task, loader(20))
        ends.append((weights(task), torch.rand(2)))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_parts_of_the_weights_are_refused() -> None:
    """A rank with a part of each weight computes nothing alone: engine=fsdp is named."""
    run: Any = SimpleNamespace(engine=SimpleNamespace(splits_weights=True, name="fsdp"))
    with pytest.raises(
        ConfigError, match="audit compares .* engine is fsdp: each rank holds a part"
    ):
        Audit().setup(run, Line(), "fit")


def test_what_cannot_be_computed_again_is_refused(tmp_path: Path) -> None:
    """Batch norm over ranks, a Task that updates itself, and an audit of no step."""

    class Manual(Line):
        """Updates its weights itself."""

        automatic_optimization = False

    with pytest.raises(ConfigError, match=r"audit .*sync_batchnorm is true: .* Leave one out"):
        quiet(tmp_path, callbacks=[Audit()], sync_batchnorm=True).fit(Line(), loader(8))
    with pytest.raises(ConfigError, match=r"Manual has automatic_optimization = False"):
        quiet(tmp_path, callbacks=[Audit()]).fit(Manual(), loader(8))
    with pytest.raises(ConfigError, match=r"every_n_steps"):
        Audit(every_n_steps=0)


def test_a_device_that_does_not_repeat_its_bits_gets_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that scatter by rounding raise no alarm; a wrong one does."""
    monkeypatch.setattr("trainkit.extensions.audit.audit._repeats_bits", lambda trainer: False)
    scatter = {"by": 1e-7}

    class Scatters(nn.Module):
        """Adds what no seed reaches, as sums in any order do."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the layer's outputs, each with noise of its own."""
            noise = torch.rand(len(x), 1, generator=self.generator)
            return self.layer(x) * (1 + scatter["by"] * noise)

    class Scattering(Line):
        """Has that model."""

        def make_model(self) -> nn.Module:
            """Return it."""
            return Scatters()

    class Later(Callback):
        """From the fourth step on a number is wrong."""

        def on_train_step_start(self, trainer: Any, task: Any) -> None:
            """Scatter by more."""
            scatter["by"] = 1e-7 if trainer.global_step < 3 else 0.5

    quiet(tmp_path, callbacks=[Audit(every_n_steps=1)]).fit(Scattering(), loader(24))
    with pytest.raises(DivergenceError, match=r"step 4: rank 0 .* the output of model"):
        quiet(tmp_path, callbacks=[Later(), Audit(every_n_steps=1)]).fit(Scattering(), loader(24))
