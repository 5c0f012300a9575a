"""The plan of a run says what the run then does, and finds what spoils one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers.toy import Line, Net, Recorder, loader, quiet
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA, Balance, Elastic, ModelCheckpoint
from trainkit.extensions.communication.settings import DiLoCo
from trainkit.extensions.plan import plan, rates
from trainkit.extensions.plan.advice import advise
from trainkit.extensions.plan.layouts import Layout
from trainkit.extensions.plan.measured import weights_of
from trainkit.extensions.plan.saved import checkpoint_rows, copy_rows
from trainkit.extensions.plan.simulated import SimulatedEngine
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.run import Run
from trainkit.run.setup import Stage


def planned(
    tmp_path: Path, task: Line, data: Any, ranks: int, **settings: Any
) -> tuple[Run, list[Callback]]:
    """Return a run that is built and not started, and its callbacks."""
    trainer = quiet(tmp_path, engine=SimulatedEngine("horovod", ranks, ranks), **settings)
    with Stage(
        "fit",
        task,
        DataSources({"train": data, "val": loader(8)}),
        trainer.callbacks,
        trainer.options,
    ) as stage:
        run = build_run(stage, StartFrom())
    return run, trainer.callbacks


def test_batches_and_steps(tmp_path: Path) -> None:
    """The arithmetic is that of the ranks asked for, with what is left for the last step."""
    run, _ = planned(tmp_path, Line(), loader(70), 8, max_epochs=3, lr_warmup_steps=2)
    rows = dict(plan.batch_rows(run))
    assert rows["global batch"] == "4 per rank x 8 ranks x 1 accumulated = 32 samples"
    assert (
        rows["learning rate"]
        == "0.1 x 8 ranks = 0.8 (lr_scaling=linear), warm-up from 0.1 over 2 steps"
    )
    assert (
        rows["last step"]
        == "6 samples instead of 32, weighted accordingly; 2 ranks have none of them"
    )
    assert rows["steps"] == "3 an epoch, 3 epochs, 9 in all"


def test_unequal_shares_and_who_changes_them(tmp_path: Path) -> None:
    """The largest microbatch is named, and when callbacks=balance splits again."""
    rows = dict(plan.batch_rows(planned(tmp_path, Line(), loader(64, 8), 2, rank_shares=[1, 3])[0]))
    assert rows["global batch"].endswith("shares 1:3")
    assert (
        rows["microbatches"]
        == "12 samples on rank 1, 4 on rank 0; the largest needs the most memory"
    )
    balance = Balance(every_n_steps=10, max_microbatch=12)
    rows = dict(plan.batch_rows(planned(tmp_path, Line(), loader(64, 8), 2, callbacks=balance)[0]))
    assert (
        rows["balance"]
        == "split again by measured speed, looked at each 10 steps; microbatches of 12 samples at"
        " most"
    )
    assert "microbatches" not in rows


class Scheduled(Line):
    """Has a schedule by steps and one by epochs."""

    def configure_optimizers(self) -> Any:
        """Return both."""
        optimizer = super().configure_optimizers()
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


def test_rates_are_those_of_the_run(tmp_path: Path) -> None:
    """The milestones' rates are what the optimizer gets in a run of the same length."""
    settings: dict[str, Any] = {
        "max_epochs": 4,
        "lr_warmup_steps": 3,
        "accumulate_grad_batches": {0: 1, 2: 2},
    }
    real = Recorder()
    quiet(tmp_path, callbacks=real, lr_reference_batch_size=8, **settings).fit(
        Scheduled(), loader(32), loader(8)
    )
    run, _ = planned(tmp_path, Scheduled(), loader(32), 1, lr_reference_batch_size=8, **settings)
    rows = {int(name.split()[1]): float(value.split()[0]) for name, value in rates.rate_rows(run)}
    assert sorted(rows) == [0, 2, 6, 12, 18, 23]
    assert rows == {step: pytest.approx(real.lrs[step], rel=1e-5) for step in rows}
    assert (run.global_step, run.current_epoch) == (0, 0)  # what is measured later trains there


class Order(Callback):
    """Notes which hooks run."""

    def __init__(self) -> None:
        self.called: list[str] = []


def _noting(name: str) -> Any:
    def hook(self: Order, *args: Any) -> None:
        self.called.append(name)

    return hook


for _name in [n for n in vars(Callback) if n.startswith("on_")]:
    setattr(Order, _name, _noting(_name))


def test_the_order_is_that_of_a_real_step(tmp_path: Path) -> None:
    """Hooks come in the plan's order when a step is taken."""
    order = Order()
    settings: dict[str, Any] = {
        "callbacks": order,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
    }
    quiet(tmp_path, max_steps=1, **settings).fit(Line(), loader(4))
    run, _ = planned(tmp_path, Line(), loader(4), 1, **settings)
    rows = plan.step_rows(run, run.hooks)
    names = [
        next(word for word in what.split() if word.startswith("on_"))
        for what, owner in rows
        if owner == "Order"
    ]
    first = order.called.index("on_train_step_start")
    assert order.called[first : first + len(names)] == names
    owners = dict(rows)
    assert owners["  training_step"] == "Line, 32-true"
    assert owners["clip by norm"] == "Trainer: at 1.0"
    assert owners["optimizer.step"] == "SGD"


@pytest.mark.parametrize(
    ("ranks", "compression", "payload"), [(1, "none", 0), (4, "none", 16), (4, "fp16", 8)]
)
def test_sizes(tmp_path: Path, ranks: int, compression: str, payload: int) -> None:
    """Bytes are counted from the tensors: 4 parameters, a momentum for each."""
    run, callbacks = planned(
        tmp_path, Line(momentum=0.9), loader(16), ranks, callbacks=ModelCheckpoint(), max_epochs=6
    )
    sizes = plan.measure(run, {"compression": compression})
    assert sizes == plan.Sizes(weights=16, gradients=16, optimizer=16, payload=payload, tensors=2)
    rows = dict(plan.size_rows(sizes, ranks))
    ring = f"{payload * 1.5:.0f} B from each rank"
    assert (ring in rows["summed in a step"]) == (ranks > 1)
    assert rows["memory of a rank"].startswith("48 B: weights 16 B, gradients 16 B, optimizer 16 B")
    assert dict(checkpoint_rows(run, callbacks, sizes)) == {
        "checkpoints": "each epoch (6 in all), at the end: 32 B each, 1 retained"
    }


def test_a_stream_has_no_steps_to_tell(tmp_path: Path) -> None:
    """Where the length is not known, that is said."""
    run, _ = planned(tmp_path, Line(), iter_of_batches(), 2)
    assert "steps" not in dict(plan.batch_rows(run))
    assert "not known" in rates.rate_rows(run)[0][1]


class iter_of_batches:  # noqa: N801 - reads like a function
    """An iterable without a length."""

    def __iter__(self) -> Any:
        yield from loader(8)


class Slow(Dataset[Any]):
    """A data set that is not in memory."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), torch.zeros(1)


class Adam(Line):
    """An adaptive method."""

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def slow(**options: Any) -> Any:
    """Return a loader of 4096 samples in batches of 16."""
    return torch.utils.data.DataLoader(Slow(), batch_size=16, **options)


FAULTS: dict[str, tuple[type[Line], Any, dict[str, Any], dict[str, Any], str]] = {
    "small batch": (Line, lambda: loader(4000), {}, {}, "data.batch_size is 4 for each rank"),
    "batch norm": (Net, slow, {}, {}, "The model has batch norm, and a rank sees"),
    "few steps": (Line, lambda: loader(70), {}, {}, "An epoch has 3 steps of 32 samples"),
    "adaptive": (
        Adam,
        slow,
        {},
        {},
        "trainer.lr_scaling is linear and multiplies the rate of AdamW by 8",
    ),
    "no warm-up": (Line, slow, {}, {}, "multiplied by 8 without warm-up"),
    "long warm-up": (
        Line,
        slow,
        {"lr_warmup_steps": 64},
        {},
        "Warm-up: 64 steps are longer than the run of 32 steps",
    ),
    "no workers": (Line, slow, {}, {}, r"loaded by the training process itself (num_workers=0)"),
    "too many workers": (
        Line,
        lambda: slow(num_workers=2),
        {},
        {},
        "8 ranks of this host with 2 loader workers each need 24",
    ),
    "log each step": (Line, slow, {"log_every_n_steps": 4}, {}, "trainer.log_every_n_steps is 4"),
    "checkpoints": (
        Line,
        slow,
        {"callbacks": ModelCheckpoint(every_n_train_steps=10, every_n_epochs=1)},
        {},
        "written each 10 steps, and each time all ranks wait until weights and optimizer state",
    ),
    "gpu number": (
        Line,
        slow,
        {},
        {"task": {"device": "cuda:1"}},
        "task.device is cuda:1: a rank or a GPU's number",
    ),
    "rank": (
        Line,
        slow,
        {},
        {"data": {"a": [{"num_gpus": 4}]}},
        "data.a.0.num_gpus is 4: a rank or a GPU's number",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_spoils_a_run_is_found(tmp_path: Path, fault: str) -> None:
    """Each anti-pattern is reported, and not of a run that lacks it."""
    make, data, settings, config, words = FAULTS[fault]
    if fault == "batch norm":
        loaded = torch.utils.data.DataLoader(Slow(), batch_size=8, num_workers=1)
    else:
        loaded = data()
    run, callbacks = planned(tmp_path, make(), loaded, 8, **settings)
    assert any(words in sentence for sentence in advise(run, callbacks, config, cores=16)), fault


def test_a_sound_run_has_nothing_to_look_at(tmp_path: Path) -> None:
    """No sentence is said of a run that has none of it;
    names that only look like a rank's are left alone.
    """
    config = {
        "task": {"low_rank": 4, "ranking": 3, "gpus": None},
        "data": {"root": "/data/cuda", "sizes": [1, 2]},
    }
    run, callbacks = planned(
        tmp_path,
        Line(),
        slow(num_workers=1),
        8,
        lr_warmup_steps=5,
        callbacks=ModelCheckpoint(every_n_epochs=1),
    )
    advice = advise(run, callbacks, config, cores=16)
    assert advice == []


def test_planning_spends_no_real_rank(tmp_path: Path) -> None:
    """The pretended ranks answer as one would."""
    with SimulatedEngine("ddp", 6, 2) as engine:
        assert (
            engine.ranks.rank,
            engine.ranks.world_size,
            engine.ranks.local_size,
            engine.name,
        ) == (0, 6, 2, "ddp")
        assert engine.comm.all_reduce(torch.ones(2)).tolist() == [6.0, 6.0]
        assert engine.comm.all_gather_object("a") == ["a"] * 6


def test_ranks_that_split_the_weights_hold_a_part() -> None:
    """engine=fsdp: each row counts what a rank holds; DeepSpeed's stages are named."""
    sizes = plan.Sizes(
        weights=8 << 20, gradients=8 << 20, optimizer=16 << 20, payload=8 << 20, tensors=2
    )
    rows = dict(plan.size_rows(sizes, 16, Layout(16, "fsdp", replicas=2)))
    assert rows["memory of a rank"].startswith(
        "4.0 MiB: a part in 8 of weights 8.0 MiB, gradients 8.0 MiB, optimizer 16.0 MiB"
    )
    assert rows["sent in a step"].endswith(
        "gathered twice and gradients summed in parts, up to 22.0 MiB a rank"
    )
    groups = dict(plan.size_rows(sizes, 16, Layout(16, "fsdp", replicas=2, tensor=2)))
    assert "what no plan splits by width, 2 times that" in groups["memory of a rank"]
    assert groups["sent in a step"].endswith(
        "; 10.0 MiB of layers split by width, and their activations"
    )
    assert (
        "before DeepSpeed splits them"
        in dict(plan.size_rows(sizes, 16, zero=True))["memory of a rank"]
    )
    assert dict(plan.size_rows(sizes, 16))["memory of a rank"].startswith(
        "32.0 MiB: weights 8.0 MiB"
    )


def test_copies_in_other_hosts_memory_are_planned() -> None:
    """What a rank sends, and what a host holds: its own part, that of another, twice while one comes."""
    sizes = plan.Sizes(weights=4 << 20, gradients=0, optimizer=8 << 20, payload=0, tensors=1)
    elastic = Elastic(commit_every_n_steps=6, copies=1)
    rows = dict(copy_rows([elastic], sizes, "fsdp", 4))
    assert rows["copies"].startswith(
        "each 6 steps 3.0 MiB of a rank to another host, 512.0 KiB a step"
    )
    assert rows["memory of a host"].startswith("9.0 MiB for each of its ranks")
    assert "15.0 MiB while" in rows["memory of a host"]
    assert "refused" in dict(copy_rows([elastic], sizes, "ddp", 1))["copies"]
    assert copy_rows([Elastic()], sizes, "fsdp", 4) == []


@pytest.mark.parametrize(
    ("layout", "buffers", "gathered", "says"),
    [
        (
            {"accumulate": 8},
            0,
            1.0,
            "weights gathered 16 times and gradients summed in parts, up to 119.0 MiB",
        ),
        (
            {"gathers_once": True, "accumulate": 8},
            0,
            1.0,
            "weights gathered once and gradients summed in parts, up to 14.0 MiB",
        ),
        ({}, 0, 0.5, "up to 14.0 MiB a rank"),
        ({}, 4 << 20, 1.0, "up to 14.0 MiB a rank"),
    ],
)
def test_split_weights_travel_as_often_as_they_are_gathered(
    layout: dict[str, Any], buffers: int, gathered: float, says: str
) -> None:
    """For each microbatch twice, or once a step; in param_dtype; buffers never."""
    sizes = plan.Sizes(
        weights=8 << 20,
        gradients=8 << 20,
        optimizer=0,
        payload=0,
        tensors=2,
        buffers=buffers,
        gathered=gathered,
    )
    rows = dict(plan.size_rows(sizes, 8, Layout(8, "fsdp", **layout)))
    assert says in rows["sent in a step"]
    whole = f"{(buffers >> 20) + ((16 << 20) - buffers) / 8 / 2**20:.1f} MiB: "
    assert rows["memory of a rank"].startswith(whole)


def test_an_average_of_the_weights_is_in_memory_and_checkpoints(tmp_path: Path) -> None:
    """callbacks=ema: a copy in float32, on the device and in each file; of communication=diloco
    shared weights and momenta.
    """
    settings: dict[str, Any] = {"callbacks": [EMA(), ModelCheckpoint()], "max_epochs": 6}
    run, callbacks = planned(tmp_path, Line(momentum=0.9), loader(16), 4, **settings)
    sizes = plan.measure(run, {})
    assert (sizes.averages, sizes.held) == (16, 0)
    memory = dict(plan.size_rows(sizes, 4))["memory of a rank"]
    assert memory.startswith("64 B: ") and "average of weights 16 B" in memory
    assert "48 B each" in dict(checkpoint_rows(run, callbacks, sizes))["checkpoints"]
    weight = weights_of(run)[0]
    assert weight.state == 4 + 4  # momentum, and the average
    run, _ = planned(tmp_path, Line(), loader(16), 4, communication=DiLoCo(), max_epochs=6)
    sizes = plan.measure(run, {})
    assert sizes.held == 32
    assert "held for communication 32 B" in dict(plan.size_rows(sizes, 4))["memory of a rank"]


class Rows(Line):
    """Has a table with sparse gradients."""

    def make_model(self) -> Any:
        """Return it."""
        return torch.nn.Embedding(100, 2, sparse=True)


@pytest.mark.parametrize(("as_dense", "sparse"), [(False, 1), (True, 0)])
def test_rows_travel_alone_unless_the_engine_makes_them_dense(
    as_dense: bool, sparse: int, tmp_path: Path
) -> None:
    """engine.sparse_as_dense: the bytes are then those of the whole table, and not at most."""
    run, _ = planned(tmp_path, Rows(), loader(16), 2)
    sizes = plan.measure(run, {"sparse_as_dense": as_dense})
    assert sizes.sparse == sparse
    summed = dict(plan.size_rows(sizes, 2))["summed in a step"]
    assert ("at most" in summed) != as_dense


class ByLBFGS(Line):
    """Updates by hand, with an optimizer that needs a closure."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        """Return L-BFGS."""
        return torch.optim.LBFGS(self.parameters(), lr=0.1, history_size=3)


def test_an_optimizer_that_needs_a_closure_is_measured(tmp_path: Path) -> None:
    """L-BFGS has two vectors of the gradients' size for each step of its history, and for the last."""
    run, _ = planned(tmp_path, ByLBFGS(), loader(16), 1, lr_scaling="none")
    assert plan.measure(run, {}).optimizer == 16 * 2 * 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train_time_interval": "00:30:00"}, "each 0:30:00, at the end: 16 B each, 1 retained"),
        (
            {"every_n_epochs": 2, "save_last": False},
            "each 2nd epoch (3 in all): 16 B each, 1 retained",
        ),
        ({"monitor": "val/loss"}, "1 retained by val/loss (min) and the newest"),
        ({"save_top_k": 0}, "the newest retained"),
    ],
)
def test_checkpoints_are_planned_as_they_are_written(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """By time too, at the end with save_last alone, and the newest beside the best."""
    keeper = ModelCheckpoint(**settings)
    run, callbacks = planned(tmp_path, Line(), loader(16), 1, callbacks=keeper, max_epochs=6)
    sizes = plan.measure(run, {})
    assert says in dict(checkpoint_rows(run, callbacks, sizes))["checkpoints"]
