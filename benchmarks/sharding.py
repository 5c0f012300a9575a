"""engine=fsdp on two ranks: a step, the memory of a rank and a checkpoint, beside fully_shard by
hand and engine=ddp.

    python -m benchmarks.sharding [--short] [--json FILE]

A GPT of 27 million parameters (recipes/gpt.py, width 512, 8 blocks; AdamW, clipped to norm 1), 2
sequences of 64 bytes a rank, on two ranks of one start by torchrun, one thread each.

    by hand     fully_shard of each block and of the model, DistributedSampler, a plain loop; FSDP2 as it comes,
                so that gradients are means over ranks
    trainkit    engine=fsdp; and engine=ddp
    DCP         by hand, and torch.distributed.checkpoint.async_save of weights and optimizer state, the last save waited for

The step: contenders take turns in the same processes, and a figure is the ratio to the loop by hand
of the same round. Memory: each contender has processes of its own; a figure is the peak of rank 0
(VmHWM) less what was resident before the model was made. The checkpoint: the step that saves less a
plain step of the same training (stall), and all beyond plain steps from one save to the next (in
all), of rank 0; the last save's writing is not waited for in either.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.memory import MALLOC, MB, resident_kb
from benchmarks.processes import answer, environment, in_turns
from recipes.gpt import GPT

RANKS, BATCH, WARM = 2, 2, 2
BY_HAND, FSDP, DDP = "fully_shard by hand", "trainkit, engine=fsdp", "trainkit, engine=ddp"
DCP = "by hand, DCP async_save"
LARGE = {"width": 512, "depth": 8, "heads": 8, "context": 64}
SMALL = {"width": 32, "depth": 2, "heads": 2, "context": 16}


class Work:
    """One training: its size, its length, and when it saves.

    Attributes:
        steps: of the training.
        every: steps between two saves; 0 saves nothing.
        begins: the start of each step, in seconds.
    """

    def __init__(self, short: bool, steps: int, every: int = 0) -> None:
        self.size, self.steps, self.every = SMALL if short else LARGE, steps, every
        self.begins: list[float] = []

    def model(self) -> GPT:
        """Return the model, with equal weights on all ranks."""
        torch.manual_seed(0)
        return GPT(**self.size)

    def data(self) -> TensorDataset:
        """Return one epoch's sequences."""
        shape = (BATCH * RANKS * (self.steps + 1), self.size["context"] + 1)
        return TensorDataset(torch.randint(256, shape, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss; notes when the step begins."""
        self.begins.append(time.perf_counter())
        tokens = batch[0]
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def seconds(self) -> list[float]:
        """Return those of each step but the first."""
        return [
            after - before for before, after in zip(self.begins, self.begins[1:], strict=False)
        ][WARM:]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, as all contenders have it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def by_hand(work: Work, folder: str = "") -> None:
    """Train as torch's documentation of fully_shard does it;
    save with DCP beside the loop if the work saves.
    """
    from torch.distributed.fsdp import fully_shard

    model = work.model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_of(model)
    data = work.data()
    loader = DataLoader(
        data, BATCH, sampler=DistributedSampler(data, RANKS, dist.get_rank(), shuffle=True)
    )
    saves: list[Any] = []
    group = dist.new_group()  # a save's collectives run beside the training's
    for step, batch in enumerate(islice(loader, work.steps), 1):
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if work.every and step % work.every == 0:
            _save_with_dcp(model, optimizer, f"{folder}/{step}", saves, group)
    for save in saves:
        save.result()


def _save_with_dcp(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: str, saves: list[Any], group: Any
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if saves:
        saves.pop().result()
    weights, state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saves.append(
            dcp.async_save(
                {"model": weights, "optimizer": state}, checkpoint_id=path, process_group=group
            )
        )


def by_trainkit(work: Work, folder: str, engine: str) -> None:
    """Train with trainkit; save with ModelCheckpoint if the work saves."""
    import trainkit

    class Task(trainkit.Task):
        def configure_model(self) -> None:
            self.model = work.model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return work.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    keeper = (
        trainkit.ModelCheckpoint(every_n_train_steps=work.every, every_n_epochs=None, save_top_k=-1)
        if work.every
        else []
    )
    trainer = trainkit.Trainer(
        engine=engine,  # type: ignore[arg-type]
        max_steps=work.steps,
        gradient_clip_val=1.0,
        callbacks=keeper,
        enable_checkpointing=bool(work.every),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=folder,
    )
    trainer.fit(Task(), DataLoader(work.data(), BATCH, shuffle=True))


CONTENDERS: dict[str, Callable[[Work, str], None]] = {
    BY_HAND: by_hand,
    FSDP: partial(by_trainkit, engine="fsdp"),
    DDP: partial(by_trainkit, engine="ddp"),
    DCP: by_hand,
}


def train(name: str, work: Work) -> Work:
    """Let a contender do a work in a folder that all ranks share."""
    made = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(made)
    CONTENDERS[name](work, made[0])
    dist.barrier()
    if dist.get_rank() == 0:
        import shutil

        shutil.rmtree(made[0])
    assert len(work.begins) == work.steps, name
    return work


def steps(short: bool, rounds: int) -> dict[str, list[list[float]]]:
    """Return each contender's seconds a step, round by round."""
    count = WARM + (2 if short else 10)
    contenders = {
        name: partial(lambda name: train(name, Work(short, count)).seconds(), name)
        for name in (BY_HAND, FSDP, DDP)
    }
    return (
        take_turns(contenders, rounds, dist.barrier)
        if rounds
        else in_turns(contenders, 0, at_once=1)
    )


def saves(short: bool, rounds: int) -> dict[str, list[list[float]]]:
    """Return each contender's plain step, stall and cost in all, in ms, save by save."""
    every, count = (3, 1) if short else (10, 3)

    def costs(name: str) -> list[float]:
        work = train(name, Work(short, every * (count + 2) + 1, every))
        lengths = [
            1000 * (after - before)
            for before, after in zip(work.begins, work.begins[1:], strict=False)
        ]
        ends = range(every - 1, len(lengths), every)  # the steps that save
        plain = statistics.median(
            length for end in ends for length in lengths[end - every // 3 : end]
        )
        stall = statistics.median(lengths[end] - plain for end in ends[1:-1])
        return [
            plain,
            stall,
            statistics.median(
                sum(lengths[end : end + every]) - every * plain for end in ends[1:-1]
            ),
        ]

    contenders = {name: partial(costs, name) for name in (DCP, FSDP)}
    return (
        take_turns(contenders, rounds, dist.barrier)
        if rounds
        else in_turns(contenders, 0, at_once=1)
    )


def worker(what: str, short: bool, rounds: int, name: str, out: Path) -> None:
    """Measure on this rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures: Any
    if what == "memory":
        import trainkit.trainer  # noqa: F401 - all imports count before

        before = resident_kb("VmRSS")
        train(name, Work(short, WARM + 1))
        figures = (resident_kb("VmHWM") - before) / MB
    else:
        figures = {"steps": steps, "saves": saves}[what](short, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # some contenders leave process groups of their own


def ask(what: str, short: bool, rounds: int = 0, name: str = "-", **environ: str) -> Any:
    """Start the ranks, and return rank 0's answer."""
    arguments = ("--worker", what, str(int(short)), str(rounds), name)
    return answer(
        "benchmarks.sharding", *arguments, env=environment(**environ), ranks=RANKS, torchrun=True
    )


def _per_round(taken: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(b) / statistics.median(a) for a, b in zip(taken, base, strict=True)]


def measure(short: bool) -> Findings:
    """Measure steps, memory and saves."""
    rounds = 0 if short else 7
    findings = Findings(
        settings={"ranks": RANKS, "batch a rank": BATCH, "threads": 1, "rounds": rounds}
    )
    taken = ask("steps", short, rounds)
    memory = {name: ask("memory", short, name=name, **MALLOC) for name in (BY_HAND, FSDP, DDP)}
    rows: list[list[Cell]] = []
    for name, own in taken.items():
        ratios = _per_round(own, taken[BY_HAND])
        step = 1000 * statistics.median(second for seconds in own for second in seconds)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append(
            [
                name,
                step,
                statistics.median(ratios),
                spread,
                memory[name],
                memory[name] / memory[BY_HAND],
            ]
        )
    columns = ["", "step, ms", "speed, of by hand", "rounds", "peak, MB", "peak, of by hand"]
    findings.tables.append(Table("A GPT of 27 million parameters, 2 ranks", columns, rows))
    ours = next(row for row in rows if row[0] == FSDP)
    speed, peak = ours[2], ours[5]
    assert isinstance(speed, float) and isinstance(peak, float)
    findings.targets.append(
        Target("engine=fsdp, of fully_shard by hand: speed", speed, 0.99, "times", "at least")
    )
    findings.targets.append(
        Target("engine=fsdp, of fully_shard by hand: peak memory", peak, 1.05, "times")
    )
    costs = ask("saves", short, 0 if short else 3)
    medians = {
        name: [statistics.median(one[i] for one in own) for i in range(3)]
        for name, own in costs.items()
    }
    rows = [[name, *own] for name, own in medians.items()]
    findings.tables.append(
        Table("A checkpoint in parts, ms", ["", "plain step", "stall", "in all"], rows)
    )
    stall = medians[FSDP][1] / medians[DCP][1]
    findings.targets.append(
        Target("a checkpoint in parts: stall, of DCP's async_save", stall, 1.0, "times")
    )
    return findings


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(
            sys.argv[2], bool(int(sys.argv[3])), int(sys.argv[4]), sys.argv[5], Path(sys.argv[6])
        )
    else:
        main(measure)
