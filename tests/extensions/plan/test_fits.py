"""Which layout a run fits in: what is measured, the arithmetic of memory, and the command of the
simplest that fits.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.data import DataLoader

from recipes.gpt import GPT
from recipes.language_model import LanguageModel
from tests.helpers.toy import Line, loader, quiet
from trainkit.extensions.context.sequence import mean_of_parts, part
from trainkit.extensions.plan import plan
from trainkit.extensions.plan.command import main
from trainkit.extensions.plan.fits import Fits, fit_rows, room_of
from trainkit.extensions.plan.layouts import Layout, MeasuredRun, Weight, rank_bytes
from trainkit.extensions.plan.measured import Measuring
from trainkit.extensions.plan.record import BackwardMoment, StepRecording
from trainkit.extensions.plan.simulated import SimulatedEngine
from trainkit.extensions.plan.starting import TypedFit
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.setup import Stage

SIZES = plan.Sizes(weights=4000, gradients=4000, optimizer=8000, payload=4000, tensors=4)
# a table, two blocks and a head of 250 weights each, whose gradients arrive from the head on; their
# activations are 6000 bytes without activation checkpointing, 1500 with it
WEIGHTS = [Weight((250,), 4, True, (unit,), unit in (1, 2), state=8.0, more=0) for unit in range(4)]
MOMENTS = [(3, 6000), (2, 5500), (1, 3000), (0, 1000)]
PLAIN = StepRecording(
    (0, 1000, 3000, 5000),
    (1000, 3000, 5000, 5500),
    tuple(BackwardMoment(place, peak) for place, peak in MOMENTS),
)
AGAIN = StepRecording(
    (0, 100, 200, 300),
    (100, 900, 1000, 1200),
    tuple(BackwardMoment(place, peak // 4) for place, peak in MOMENTS),
)
MEASURED = MeasuredRun(
    WEIGHTS,
    buffers=0,
    recordings={(1, 1, 0): PLAIN, (1, 1, 1): AGAIN},
    split={},
    entering=(0, 200, 200, 200),
    stages={2: (0, 0, 1, 1)},
    work=(0, 10, 10, 10),
)


class Block(nn.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return x + self.down(torch.tanh(self.up(x)))


class Deep(Line):
    """Three blocks and a last layer."""

    plan: Any = None

    def make_model(self) -> nn.Module:
        """Return them."""
        return nn.Sequential(Block(), Block(), Block(), nn.Linear(3, 1))

    def parallelize(self, mesh: Any) -> Any:
        """Return the plan of widths."""
        return self.plan


def measured(
    task: Line, tmp_path: Path, data: Any = None, ranks: int = 2, **settings: Any
) -> Measuring:
    """What is measured of a run's largest microbatch, with 2 and 4 ranks that share samples."""
    engine = SimulatedEngine("fsdp", ranks, ranks)
    trainer = quiet(tmp_path, engine=engine, max_epochs=1, **settings)
    sources = DataSources({"train": loader() if data is None else data})
    with Stage("fit", task, sources, trainer.callbacks, trainer.options) as stage:
        run = build_run(stage, StartFrom())
        result = Measuring(run)
        result.measure([2, 4], [2, 4], [2, 4])
        plan.measure(run, {})
        result.measured()
    return result


def test_activations_are_measured(tmp_path: Path) -> None:
    """Each block keeps its 64 features (float32) and little else; with activation checkpointing one
    block has them at a time. A step has 4 samples, of which one and two are run.
    """
    recordings = measured(Deep(), tmp_path).recordings
    features = 64 * 4 * 4
    assert 3 * features < recordings[1, 1, 0].peak < 5.5 * features
    assert features < recordings[1, 1, 1].peak < 3 * features
    starts = recordings[1, 1, 0].starts
    assert [after - before for before, after in zip(starts, starts[1:], strict=False)] == [
        features + 3 * 4 * 4
    ] * 3


def test_a_model_without_blocks_has_nothing_to_recompute(tmp_path: Path) -> None:
    """A single layer: activation checkpointing is not measured, nor are stages."""
    result = measured(Line(), tmp_path)
    assert {again for *_, again in result.recordings} == {0}
    assert "has 0 blocks" in result.left_out["engine.pipeline=2"]


def test_a_run_with_activation_checkpointing_is_measured_as_it_is(tmp_path: Path) -> None:
    """Without a layout that leaves it out; the blocks compute again afterwards, too."""
    result = measured(Deep(), tmp_path, activation_checkpointing=True)
    assert {again for *_, again in result.recordings} == {1}


class Normed(Deep):
    """Has batch norm."""

    def make_model(self) -> nn.Module:
        """Return a layer and a norm."""
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_batch_norm_is_measured_of_two_samples_and_four(tmp_path: Path) -> None:
    """It takes no single one."""
    peak = measured(Normed(), tmp_path).recordings[1, 1, 0].peak
    assert 4 * (3 + 8 + 8 + 1) * 4 < peak < 4 * 1000


class Text(Line):
    """Blocks with attention over 32 tokens, which the step takes its part of."""

    def make_model(self) -> nn.Module:
        """Return the recipe's model."""
        return GPT(vocab_size=16, context=32, width=16, depth=2, heads=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean over the tokens."""
        logits_BTV = self.model(part(batch))
        next_N = part(batch).flatten()
        return mean_of_parts(functional.cross_entropy(logits_BTV.flatten(0, 1), next_N))


def texts() -> Any:
    """Rows of 32 tokens, 4 in a microbatch."""
    return DataLoader(torch.zeros(32, 32, dtype=torch.long), batch_size=4)  # type: ignore[arg-type]


def test_a_step_on_shapes_has_the_bytes_of_one_on_the_cpu(tmp_path: Path) -> None:
    """Of attention, whatever is recomputed and shared; a step that asks for a value is taken on the
    CPU.
    """
    taken = {"shapes": 0, "values": 0}

    class Counts(Text):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            taken["shapes" if isinstance(loss, FakeTensor) else "values"] += loss.requires_grad
            return loss

    class Asks(Counts):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    by_shapes = measured(Counts(), tmp_path / "shapes", texts()).recordings
    assert taken["shapes"] > 4
    assert taken["values"] == 0
    taken |= {"shapes": 0}
    assert measured(Asks(), tmp_path / "values", texts()).recordings == by_shapes
    assert taken["values"] == 2 * taken["shapes"]  # of one sample, which is tried first, and of two


def test_a_sparse_gradient_is_measured(tmp_path: Path) -> None:
    """By its rows, beside which the table's whole gradient would be 400 times as large."""

    class Rows(Line):
        def make_model(self) -> nn.Module:
            return nn.Embedding(10_000, 8, sparse=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch).square().sum()

    peak = measured(Rows(), tmp_path, texts()).recordings[1, 1, 0].peak
    assert 4 * 32 * 8 * 4 < peak < 10_000 * 8 * 4


def test_ranks_that_share_sequences_are_measured(tmp_path: Path) -> None:
    """Half of the tokens need half of the activations, and the keys and values of all."""
    recordings = measured(Text(), tmp_path, texts(), 4).recordings
    keys = 2 * 4 * 32 * 16 * 4  # of a layer, with values: 4 samples, 32 tokens, width 16, float32
    for ranks in (2, 4):
        shared = recordings[1, ranks, 0]
        own = recordings[1, 1, 0].peak / ranks
        assert own < shared.peak < own + 5 * keys
        assert recordings[1, ranks, 1].peak < shared.peak
        # of two layers, in forward and in backward
        assert shared.sent == 2 * 2 * (ranks - 1) * keys / ranks


def test_ranks_that_share_widths_are_measured(tmp_path: Path) -> None:
    """A block's features are split, and what goes in and out of it is whole and sent."""
    task = Deep()
    task.plan = {"model.*.up": "colwise", "model.*.down": "rowwise"}
    result = measured(task, tmp_path)
    features, around = 64 * 4 * 4, 3 * 4 * 4
    for ranks in (2, 4):
        starts = result.recordings[ranks, 1, 0].starts
        assert starts[1] - starts[0] == features / ranks + around
        # forward and backward of three blocks, by a ring; the first has no gradient to sum, and
        # counts all the same
        sent = 3 * 2 * 2 * (ranks - 1) / ranks * 3 * 4 * 4
        assert result.recordings[ranks, 1, 0].sent == sent
    split = {0: 0, 1: 0, 2: 1}  # up's weight and bias, down's weight
    assert {place: result.split[2].get(place) for place in range(4)} == split | {3: None}


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (None, "Deep names no layers to split by width"),
        ({"model.3": "colwise"}, "engine.tensor is 2, and 'model.3' has 1 outputs"),
        ({"model.9": "colwise"}, "names 'model.9', which is no module of Deep"),
    ],
)
def test_what_the_task_cannot_take_is_left_out_with_a_reason(
    layers: Any, reason: str, tmp_path: Path
) -> None:
    """Ranks that share widths, tokens of a step that takes no part, and more stages than blocks."""
    task = Deep()
    task.plan = layers
    left_out = measured(task, tmp_path, ranks=4).left_out
    assert reason in left_out["engine.tensor=2"] and "engine.tensor=4" not in left_out
    assert "Deep takes no part of a sequence" in left_out["engine.context=2"]
    assert "has 3 blocks" in left_out["engine.pipeline=4"]


def fits_of(ranks: int, local: int, microbatches: int | None = None, **more: Any) -> Fits:
    """The layouts of the model above."""
    count = ranks if microbatches is None else microbatches
    return Fits(replace(MEASURED, **more), SIZES, {}, (ranks, local), count, 1)


def device(fits: Fits, **layout: Any) -> int:
    """The bytes of a layout."""
    return fits.fit(Layout(16, **{"engine": "fsdp"} | layout)).device


def test_the_memory_of_each_layout() -> None:
    """16 ranks on 2 hosts. As the head gets its gradient, the least is summed and the most is held;
    under fsdp a block's backward has two blocks gathered, and its gradients, beside the rest.
    """
    fits = fits_of(16, 8)
    state = 3 * 4000
    assert device(fits, engine="auto") == state + 5500 + 1000
    of_sixteen = 3 * 4 * 16 * 4
    assert device(fits, gathers_once=True) == of_sixteen + 5500 + 4000 + 1000 + 16 * 4
    assert device(fits, replicas=2) == 3 * 4 * 32 * 4 + 5500 + 2000 + 2000 + 1000 + 32 * 4
    assert device(fits) == of_sixteen + 5500 + 2000 + 2000 + 1000 + 16 * 4
    assert device(fits, recomputes=True) == of_sixteen + 1375 + 5000 + 16 * 4
    offloaded = fits.fit(Layout(16, "fsdp", offloads=True, recomputes=True))
    assert (offloaded.device, offloaded.ranks[0].host) == (1375 + 5000 + 64, of_sixteen + 4 * 64)


def test_several_microbatches_hold_whole_gradients() -> None:
    """From the first to the last of a step, on each rank; a rank that shares its samples has more."""
    once, twice = fits_of(16, 8, 16), fits_of(16, 8, 32)
    assert device(twice, engine="auto") == 3 * 4000 + 6000 + 4000 != device(once, engine="auto")
    assert device(twice) == device(once) - 16 * 4 + 4000


@pytest.mark.parametrize(
    ("ranks", "gathered"),
    [
        pytest.param(2, 0, id="a rank has its stage alone"),
        pytest.param(4, 2000, id="two ranks split a stage, and gather its weights"),
    ],
)
def test_a_stage_holds_its_layers_and_microbatches(ranks: int, gathered: int) -> None:
    """The first of two stages has two microbatches under way, and the last one its head and loss."""
    first, last = rank_bytes(MEASURED, Layout(ranks, "fsdp", pipeline=2, accumulate=4))
    assert (first.weights, last.weights) == (2000 * 2 / ranks, 2000 * 2 / ranks)
    assert (first.optimizer, last.optimizer) == (4000 * 2 / ranks, 4000 * 2 / ranks)
    microbatch = 3000 + 200  # the activations of another microbatch, and what it has handed on
    gradients = 2000
    assert first.step == 3000 + microbatch + gradients + gathered
    own = 3000 - 200  # alive as the second stage begins, but for what it takes
    sent = 2 * 200  # gradients on their way to the first stage
    assert last.step == 6000 - own + sent + gradients + gathered


def test_a_rank_has_a_part_of_split_widths() -> None:
    """Two ranks share the blocks' weights, and four data ranks split what each has."""
    recordings = {(2, 1, 0): PLAIN}
    fits = fits_of(8, 8, split={2: {1: 0, 2: 0}}, recordings=recordings)
    own = fits.fit(Layout(8, "fsdp", tensor=2)).ranks[0]
    assert own.weights == 4 * (2 * 63 + 2 * 32)


def settings_of(memory_bytes: float, ranks: int = 16, **more: Any) -> list[str]:
    """The settings that are listed, as those that fit are marked."""
    room = memory_bytes
    fits = fits_of(ranks, min(ranks, 8), **more).all(room)
    return [f"{own.settings}{' fits' * (own.device <= room)}" for own in fits]


def test_the_simplest_come_first() -> None:
    """By the number of means, then in the order of the page; weights in host memory are last."""
    more: dict[str, Any] = {"split": {2: {}}}
    more["recordings"] = {
        (tensor, context, again): AGAIN if again else PLAIN
        for tensor, context in ((1, 1), (2, 1), (1, 2))
        for again in (0, 1)
    }
    listed = [
        own.replace("engine=fsdp ", "").replace("trainer.", "") for own in settings_of(1, **more)
    ]
    count = "accumulate_grad_batches="
    again = "activation_checkpointing=true"
    assert listed == [
        "engine=auto",
        "engine.reshard_after_forward=false",
        "engine.replicas=2",
        "engine=fsdp",
        f"engine=auto {again}",
        f"engine.tensor=2 {count}2",
        f"engine.pipeline=2 {count}2",
        f"engine.context=2 {count}2",
        f"engine.reshard_after_forward=false {again}",
        f"engine.replicas=2 {again}",
        again,
        f"engine.tensor=2 engine.pipeline=2 {count}4",
        f"engine.tensor=2 {again} {count}2",
        f"engine.pipeline=2 {again} {count}2",
        f"engine.context=2 {again} {count}2",
        f"engine.tensor=2 engine.pipeline=2 {again} {count}4",
        f"engine.cpu_offload=true {again}",
    ]


def test_of_several_numbers_of_ranks_the_first_that_fits_is_listed() -> None:
    """Or the last one: then none fits."""
    more: dict[str, Any] = {"stages": {2: (0, 0, 1, 1), 4: (0, 1, 2, 3)}}
    stages = [own for own in settings_of(1e9, **more) if "pipeline" in own]
    assert stages[0].startswith("engine=fsdp engine.pipeline=2 ") and stages[0].endswith(" fits")
    stages = [own for own in settings_of(1, **more) if "pipeline" in own]
    assert stages[0].startswith("engine=fsdp engine.pipeline=4 ") and "fits" not in stages[0]


@pytest.mark.parametrize(
    ("memory_bytes", "use"),
    [
        (25000, "horovodrun ... python -m trainkit fit conf=gpt"),
        (
            13000,
            "torchrun ... -m trainkit fit conf=gpt engine=fsdp engine.reshard_after_forward=false",
        ),
        (
            8500,
            (
                "torchrun ... -m trainkit fit conf=gpt engine=fsdp"
                " engine.reshard_after_forward=false trainer.activation_checkpointing=true"
            ),
        ),
    ],
)
def test_the_first_that_fits_is_named(memory_bytes: int, use: str) -> None:
    """A tenth of the memory is left for the rest."""
    room = room_of(memory_bytes / 1e9)
    listed, fits = fit_rows(
        fits_of(16, 16, stages={}).all(room), {}, memory_bytes / 1e9, TypedFit("conf=gpt")
    )
    assert fits
    assert dict(listed)["use"] == use


def test_a_row_has_bytes_costs_and_verdict() -> None:
    """And those of what is left out, the reason."""
    fits = fits_of(16, 8)
    left_out = {"engine.tensor=2": "it has 3 heads"}
    listed, _ = fit_rows(fits.all(1e9), left_out, 1, TypedFit("conf=gpt"))
    rows = dict(listed)
    assert rows["without engine.tensor=2"] == "it has 3 heads"
    again = rows["engine=fsdp trainer.activation_checkpointing=true"]
    assert again.endswith("sends 11.0 KiB: fits; blocks compute their forward twice")
    stages = rows["engine=fsdp engine.pipeline=2 trainer.accumulate_grad_batches=2"]
    assert (
        ", on stage 0, sends 4.2 KiB (weights and gradients 3.4 KiB, stages 800 B): fits" in stages
    )
    assert stages.endswith("; ranks wait 40% of a step")


def test_layouts_are_values_too() -> None:
    """For --json: bytes of each stage, what is sent, and the verdict."""
    own = fits_of(2, 2).fit(Layout(2, "fsdp", pipeline=2))
    facts = own.facts(room=1e9)
    assert facts["fits"] and facts["device_bytes"] == own.device
    assert [stage["weights"] for stage in facts["stages"]] == [2000, 2000]
    assert facts["sent_bytes"] == {"weights and gradients": 0, "stages": 800}


def test_nothing_fits() -> None:
    """Then the rows say what else to change."""
    listed, fits = fit_rows(fits_of(16, 16).all(1), {}, 1e-9, TypedFit("conf=gpt"))
    assert not fits
    rows = dict(listed)
    assert "use" not in rows and rows["none fits"].startswith("use more ranks")


@pytest.mark.parametrize("value", ["0", "-1", "much"])
def test_a_size_that_is_none_is_an_error(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the key and the value."""
    assert main("plan", ["conf=mlp", f"memory_gb={value}"]) == 2
    assert (
        f"memory_gb is '{value}'; it must be a whole number, 1 or more." in capsys.readouterr().err
    )


def test_a_script_gets_arguments_of_its_trainer() -> None:
    """It has no overrides: the arguments of its Trainer are named."""
    use = functools.partial(used, "mine.py --x 1")
    assert use(25e-6) == "horovodrun ... python mine.py --x 1"
    assert use(25e-6, "fsdp") == (
        'horovodrun ... python mine.py --x 1, and give its Trainer engine="auto"'
    )
    assert use(8e-6) == (
        "torchrun ... mine.py --x 1, and give its Trainer"
        " engine=FSDPEngine(reshard_after_forward=False), activation_checkpointing=True (from"
        " trainkit.extensions.fsdp.engine import FSDPEngine)"
    )


def used(line: str, memory_gb: float, engine_name: str = "auto", **engine: Any) -> str:
    """What is recommended to 16 ranks of a fit."""
    typed = TypedFit(line, engine_name, engine)
    fits = fits_of(16, 16, stages={})
    rows, _ = fit_rows(fits.all(memory_gb * 1e9), {}, memory_gb / 0.9, typed)
    return dict(rows)["use"]


@pytest.mark.parametrize(
    ("line", "memory_gb", "options", "use"),
    [
        pytest.param(
            "conf=gpt engine=fsdp engine.tensor=2 seed=1",
            25e-6,
            {"tensor": 2},
            "horovodrun ... python -m trainkit fit conf=gpt seed=1 engine=auto",
            id="whole copies: the typed engine is left out",
        ),
        pytest.param(
            "conf=gpt engine=fsdp engine.tensor=2 engine.shard=[Block]",
            13e-6,
            {"tensor": 2},
            "torchrun ... -m trainkit fit conf=gpt engine.shard=[Block] engine=fsdp"
            " engine.reshard_after_forward=false",
            id="what no layout decides stays",
        ),
        pytest.param(
            "conf=gpt trainer.activation_checkpointing=false",
            8e-6,
            {},
            "torchrun ... -m trainkit fit conf=gpt engine=fsdp engine.reshard_after_forward=false"
            " trainer.activation_checkpointing=true",
            id="a setting of the trainer that a layout decides",
        ),
        pytest.param(
            "conf=mine",
            13e-6,
            {"tensor": 2, "cpu_offload": True},
            "torchrun ... -m trainkit fit conf=mine engine=fsdp engine.reshard_after_forward=false"
            " engine.tensor=1 engine.cpu_offload=false",
            id="set in the config's file",
        ),
    ],
)
def test_the_recommended_line_starts_the_layout_that_fits(
    line: str, memory_gb: float, options: dict[str, Any], use: str
) -> None:
    """What was typed, or stands in a file, of the engine gives way to the layout's settings."""
    assert used(line, memory_gb, "fsdp" if options else "auto", **options) == use


def test_whole_copies_have_the_typed_engine() -> None:
    """Horovod's and DDP's own options stay."""
    line = "conf=gpt engine=horovod engine.compression=fp16"
    use = used(line, 25e-6, "horovod", compression="fp16")
    assert use == f"horovodrun ... python -m trainkit fit {line}"


def test_layouts_of_another_batch_are_left_out() -> None:
    """4 ranks that share samples by twos take 2 microbatches a step, and 4 alone at least 4."""
    fits = fits_of(4, 4, 2)
    listed = [own.settings for own in fits.all(1e9)]
    assert listed and all("engine.pipeline=2" in settings for settings in listed)
    assert "2 microbatches" in fits.left_out["layouts of another global batch"]


def test_what_is_sent_is_that_of_rings() -> None:
    """Of whole copies 2 (n - 1) / n of the gradients, as they are summed; of split weights (n - 1) / n
    each time, of what is gathered: no buffers, no gradients of frozen weights, and half of them as
    bfloat16.
    """
    frozen = [replace(weight, trained=index > 0) for index, weight in enumerate(WEIGHTS)]
    fits = fits_of(2, 2, stages={}, weights=frozen, buffers=600)
    assert fits.fit(Layout(2)).sent == {"gradients": SIZES.payload}
    assert fits.fit(Layout(2, "fsdp")).sent == {"weights and gradients": (2 * 4000 + 3000) // 2}
    replicas = fits_of(4, 2, stages={}).fit(Layout(4, "fsdp", replicas=2))  # and sums between them
    assert replicas.sent == {"weights and gradients": 3 * 4000 // 2 + 4000 // 2}
    half = Fits(MEASURED, replace(SIZES, gathered=0.5), {}, (2, 2), 2, 1)
    assert half.fit(Layout(2, "fsdp")).sent == {"weights and gradients": (4000 + 4000) // 2}


def test_heads_that_ranks_do_not_divide_are_named(tmp_path: Path) -> None:
    """By the recipe's own sentence; two ranks share them."""
    model = GPT(vocab_size=16, context=32, width=16, depth=2, heads=2)
    task: Any = LanguageModel(model, torch.optim.SGD)
    result = measured(task, tmp_path, texts(), 4)
    assert "it must divide task.model.heads=2" in result.left_out["engine.tensor=4"]
    assert (2, 1, 0) in result.recordings
