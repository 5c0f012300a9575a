"""engine.pipeline=2 on two ranks, beside torch.distributed.pipelining by hand.

    python -m benchmarks.pipelines [--short] [--json FILE]

The GPT of benchmarks/sharding.py (27 million parameters; AdamW, clipped to norm 1), 8 microbatches
of 2 sequences of 64 bytes a step, by 1F1B, cut at the same block: two ranks of one start by
torchrun, one thread each.

    by hand     two PipelineStages, Schedule1F1B, the gradient of the weight that embedding and
                head share summed over both, and a norm over both
    trainkit    engine=fsdp engine.pipeline=2, the Task of one process

Contenders take turns in the same processes, and a figure is the ratio to the schedule by hand of
the same round. The losses of both must be equal.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.processes import answer, environment, in_turns
from benchmarks.sharding import BATCH, WARM, Work, optimizer_of
from recipes.gpt import GPT

RANKS, MICROBATCHES = 2, 8
BY_HAND, OURS = "torch's Schedule1F1B by hand", "trainkit, engine.pipeline=2"


class PipelineWork(Work):
    """One training, of `MICROBATCHES` microbatches a step.

    Attributes:
        losses: of the last stage's microbatches.
    """

    def __init__(self, short: bool, steps: int) -> None:
        super().__init__(short, steps)
        self.losses: list[float] = []

    def note(self) -> None:
        """Note that a step begins."""
        self.begins.append(time.perf_counter())

    def batches(self) -> Tensor:
        """Return the sequences of all steps, in order."""
        shape = (BATCH * MICROBATCHES * self.steps, self.size["context"] + 1)
        return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


class Half(nn.Module):
    """A stage: the first or the last blocks of a GPT."""

    def __init__(self, model: GPT, is_first: bool) -> None:
        super().__init__()
        blocks = list(model.blocks)
        middle = len(blocks) // 2
        self.blocks = nn.Sequential(*(blocks[:middle] if is_first else blocks[middle:]))
        self.ends = nn.ModuleList(
            [model.tokens, model.places] if is_first else [model.norm, model.head]
        )
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage takes, or logits."""
        first, second = self.ends
        if self.is_first:
            return self.blocks(first(x) + second.weight[: x.shape[1]])  # type: ignore[no-any-return]
        return second(first(self.blocks(x)))  # type: ignore[no-any-return]


def by_hand(work: PipelineWork) -> None:
    """Train as torch's documentation of pipelining does it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    half = Half(work.model(), rank == 0)
    optimizer = optimizer_of(half)
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    for tokens in work.batches().split(BATCH * MICROBATCHES):
        work.note()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens[:, :-1])
        else:
            losses: list[Tensor] = []
            schedule.step(target=tokens[:, 1:], losses=losses)
            work.losses += [float(loss.detach()) for loss in losses]
        _sum_shared(half)
        _clip(half)
        optimizer.step()


def _shared(half: Half) -> nn.Parameter:
    """Return the weight that both stages hold: of the embedding and of the head."""
    first, second = half.ends
    return (first if half.is_first else second).weight  # type: ignore[return-value]


def _sum_shared(half: Half) -> None:
    dist.all_reduce(_shared(half).grad)


def _clip(half: Half) -> None:
    shared = _shared(half)
    gradients = [
        p.grad
        for p in half.parameters()
        if p.grad is not None and (half.is_first or p is not shared)
    ]
    square = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(half.parameters(), 1.0, square.sqrt())


def by_trainkit(work: PipelineWork, folder: str) -> None:
    """Train with trainkit."""
    import trainkit
    from trainkit.engine.select import make_engine

    class Task(trainkit.Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def pipeline_stages(self) -> list[list[nn.Module]]:
            model = self.model
            middle = len(model.blocks) // 2
            first, last = list(model.blocks[:middle]), list(model.blocks[middle:])
            return [[model.tokens, model.places, *first], [*last, model.norm, model.head]]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % MICROBATCHES == 0:
                work.note()
            logits = self.model(batch[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            work.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    trainer = trainkit.Trainer(
        engine=make_engine("fsdp", pipeline=RANKS),
        max_steps=work.steps,
        accumulate_grad_batches=MICROBATCHES,
        gradient_clip_val=1.0,
        lr_scaling="none",
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=folder,
    )
    trainer.fit(Task(), DataLoader(work.batches(), BATCH))  # type: ignore[arg-type]


def train(name: str, work: PipelineWork) -> PipelineWork:
    """Let a contender do a work."""
    if name == BY_HAND:
        by_hand(work)
    else:
        with tempfile.TemporaryDirectory() as folder:
            made = [folder]
            dist.broadcast_object_list(made)
            by_trainkit(work, made[0])
            dist.barrier()
    assert len(work.begins) == work.steps, name
    return work


def steps(short: bool, rounds: int) -> dict[str, Any]:
    """Return each contender's seconds a step, round by round; and the losses of one round."""
    count = WARM + (2 if short else 4)
    losses: dict[str, list[float]] = {}

    def seconds(name: str) -> list[float]:
        work = train(name, PipelineWork(short, count))
        losses[name] = work.losses
        return work.seconds()

    contenders = {name: partial(seconds, name) for name in (BY_HAND, OURS)}
    taken = (
        take_turns(contenders, rounds, dist.barrier)
        if rounds
        else in_turns(contenders, 0, at_once=1)
    )
    return {"taken": taken, "losses": losses}


def worker(short: bool, rounds: int, out: Path) -> None:
    """Measure on this rank; by hand the last stage is rank 1's, in trainkit rank 0's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = steps(short, rounds)
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, measured["losses"])
    if dist.get_rank() == 0:
        measured["losses"] = {BY_HAND: everyone[1][BY_HAND], OURS: everyone[0][OURS]}
        out.write_text(json.dumps(measured))
    dist.barrier()
    os._exit(0)  # some contenders leave process groups of their own


def _per_round(taken: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(b) / statistics.median(a) for a, b in zip(taken, base, strict=True)]


def measure(short: bool) -> Findings:
    """Measure steps."""
    rounds = 0 if short else 14  # short ones: a machine's speed changes from minute to minute
    found = Findings(
        settings={
            "ranks": RANKS,
            "microbatches": MICROBATCHES,
            "sequences of one": BATCH,
            "threads": 1,
            "rounds": rounds,
        }
    )
    arguments = ("--worker", str(int(short)), str(rounds))
    measured = answer(
        "benchmarks.pipelines", *arguments, env=environment(), ranks=RANKS, torchrun=True
    )
    taken, losses = measured["taken"], measured["losses"]
    pairs = zip(losses[BY_HAND], losses[OURS], strict=True)
    apart = max(abs(a - b) / a for a, b in pairs)
    assert apart < 1e-4, f"the losses differ by {apart}"
    rows: list[list[Cell]] = []
    for name, own in taken.items():
        ratios = _per_round(own, taken[BY_HAND])
        step = 1000 * statistics.median(second for seconds in own for second in seconds)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append([name, step, statistics.median(ratios), spread])
    columns = ["", "step, ms", "speed, of by hand", "rounds"]
    found.tables.append(Table("A GPT of 27 million parameters, 2 stages", columns, rows))
    speed = next(row for row in rows if row[0] == OURS)[2]
    assert isinstance(speed, float)
    found.targets.append(
        Target("engine.pipeline=2, of torch's schedule: speed", speed, 0.97, "times", "at least")
    )
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(bool(int(sys.argv[2])), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(measure)
