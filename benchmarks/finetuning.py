"""Supervised fine-tuning of a small Llama: conf=sft beside a loop by hand and TRL's SFTTrainer, with
packing and with padding, of all weights and of LoRA's.

    python -m benchmarks.finetuning [--short] [--json FILE]

A Llama of random weights, conversations of bytes whose lengths differ as those of chats do (a
log-normal), loss on the answers, float32, AdamW with a constant rate, gradients clipped to norm 1,
one thread. The contenders (finetuners.py) train on the same documents in the same order:

    packed    documents share rows, by trainkit's best fit, and do not see each other
    padded    as many documents a step as packed rows hold on average, each in a row of its own,
              filled up to the longest of the step

    by hand               transformers' model, rows packed or padded by a collate of a few lines, a plain loop; peft's
                          get_peft_model for LoRA
    trainkit              conf=sft as it is shipped, with callbacks=lora for LoRA; loggers are on
    TRL                   SFTTrainer, without the gradient checkpointing that it has by default. Its packing lays all rows
                          of a microbatch one behind the other, for flash attention's kernels, which a CPU lacks: its mask has
                          the square of the microbatch's length
    TRL, a row at a time  packed, with microbatches of one row and gradient accumulation, which has not

A token is one of a message or of the chat template; padding is none. Seconds are CPU time;
contenders take turns, and each step has the least time of all rounds, since other work on the
machine only adds to it (by caches and clock rates, to CPU time too). Beside a ratio stand
the least and the largest of those within a round. Each contender's losses are compared with those of
the loop by hand, step by step: a figure of another training would mean nothing. Memory: a process for
each; the peak (VmHWM) less what was resident before the model was made.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.finetuners import (
    BY_HAND,
    BY_ROWS,
    CONTENDERS,
    OURS,
    TRL,
    InOrder,
    Work,
    missing,
    train,
)
from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.memory import MALLOC, MB, resident_kb
from benchmarks.processes import answer, environment

MODES = ("packed", "padded")
NEAR = 2e-4  # of losses in float32: sums in another order, and a few updates by them


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        config: of the Llama.
        max_length: tokens of a packed row.
        rows: of a packed step.
        conversations: number of them.
        median: of a conversation's tokens.
        steps: timed; one before them is not.
        rounds: of turns.
    """

    config: dict[str, int]
    max_length: int
    rows: int
    conversations: int
    median: int
    steps: int
    rounds: int


_FULL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 1024}
_TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 300}
FULL = Size(_FULL, 320, 4, 400, 64, 3, 12)
SHORT = Size(_TINY, 128, 2, 40, 40, 2, 1)


def write_conversations(size: Size, path: Path) -> None:
    """Write chats of a question and an answer of random letters, of log-normal lengths."""
    draw = random.Random(0)
    overhead = 40  # tokens of the template
    with path.open("w") as file:
        for _ in range(size.conversations):
            tokens = draw.lognormvariate(math.log(size.median), 0.8)
            length = max(8, min(int(tokens), size.max_length) - overhead)
            text = "".join(draw.choice("abcdefgh ") for _ in range(length))
            asked, answered = text[: length // 3], text[length // 3 :]
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


class Bench:
    """The model and the data of all contenders.

    Attributes:
        size: of everything.
        folder: of the model.
        data: layout -> conversations.
    """

    def __init__(self, size: Size, folder: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self.size, self.folder = size, str(folder / "model")
        write_conversations(size, folder / "chats.jsonl")
        torch.manual_seed(0)
        config = size.config | {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **config,
                max_position_embeddings=size.max_length,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=2,
            )
        )
        model.save_pretrained(self.folder)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        file, longest = str(folder / "chats.jsonl"), size.max_length
        packed = InOrder(file, batch_size=size.rows, max_length=longest)
        packed.setup("fit")
        documents = len(packed.train.documents) / len(packed.train) * size.rows
        padded = InOrder(file, batch_size=round(documents), max_length=longest, packing=False)
        padded.setup("fit")
        padded.used_layout = "padded"
        self.data = dict(zip(MODES, (packed, padded), strict=True))

    def work(self, mode: str, lora: bool) -> Work:
        """Return a training to do."""
        return Work(self.folder, self.data[mode], lora, 1 + self.size.steps)

    def names(self, mode: str) -> list[str]:
        """Return the contenders that are installed."""
        names = [name for name in CONTENDERS if name not in missing()]
        return [name for name in names if mode == "packed" or name != BY_ROWS]

    def seconds(self, mode: str, lora: bool) -> dict[str, list[list[float]]]:
        """Return each contender's seconds of each step, round by round.

        Raises:
            AssertionError: a contender's losses are not those of the loop by hand.
        """
        losses: dict[str, list[float]] = {}

        def turn(name: str) -> list[float]:
            done = train(name, self.work(mode, lora))
            losses[name] = done.step_losses()
            return done.seconds()

        contenders = {name: partial(turn, name) for name in self.names(mode)}
        taken = take_turns(contenders, self.size.rounds)
        for name, own in losses.items():
            for ours, right in zip(own, losses[BY_HAND], strict=True):
                assert abs(ours - right) < NEAR, (name, mode, lora, losses)
        return taken

    def tokens(self, mode: str) -> int:
        """Return those of the timed steps."""
        return sum(self.data[mode].tokens[1 : 1 + self.size.steps])

    def positions(self, mode: str) -> float:
        """Return how many positions a step computes for each token."""
        data = self.data[mode]
        batches: Iterator[Any] = islice(data.train_dataloader(), 1, 1 + self.size.steps)
        computed = sum(batch["input_ids"].numel() for batch in batches)
        return computed / self.tokens(mode)


def least(rounds: Sequence[Sequence[float]]) -> float:
    """Return the seconds of all steps, each of them the least of its rounds."""
    return sum(min(step) for step in zip(*rounds, strict=True))


def spread(own: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> str:
    """Return how many times as fast as the base: the least and the largest of the rounds."""
    ratios = [sum(b) / sum(a) for a, b in zip(own, base, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def peak(name: str, mode: str, lora: bool, short: bool) -> float:
    """Return a contender's peak memory in a process of its own, in MB."""
    arguments = ("--train", name, mode, str(int(lora)), str(int(short)))
    taken: float = answer("benchmarks.finetuning", *arguments, env=environment(**MALLOC))
    return taken


def train_alone(name: str, mode: str, lora: bool, short: bool, out: Path) -> None:
    """Train in this process; write what its memory grew by at most, in MB."""
    import torch._dynamo  # noqa: F401 - torch imports it with the first optimizer; here it counts for all
    from transformers import Trainer  # noqa: F401

    import trainkit.trainer  # noqa: F401 - as are these

    if not missing():
        from trl import SFTTrainer  # noqa: F401
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(SHORT if short else FULL, Path(folder))
        before = resident_kb("VmRSS")
        train(name, bench.work(mode, lora))
    out.write_text(json.dumps((resident_kb("VmHWM") - before) / MB))


def table(bench: Bench, lora: bool, peaks: Callable[[str, str, bool], float]) -> Table:
    """Return the figures of all contenders."""
    taken = {mode: bench.seconds(mode, lora) for mode in MODES}
    columns = [""]
    for mode in MODES:
        columns += [f"{mode}: tokens/s", "of by hand", "in a round", "peak, MB"]
    columns.append("packed, of padded")
    rows: list[list[Cell]] = []
    for name in taken["packed"]:
        row: list[Cell] = [name]
        speeds: dict[str, float] = {}
        for mode in MODES:
            timed, base = taken[mode], taken[mode][BY_HAND]
            own = timed[TRL if name not in timed else name]
            speeds[mode] = bench.tokens(mode) / least(own)
            if name not in timed:
                row += [None] * 4
                continue
            row += [speeds[mode], least(base) / least(own), spread(own, base)]
            row.append(peaks(name, mode, lora))
        rows.append([*row, speeds["packed"] / speeds["padded"]])
    what = "LoRA" if lora else "all weights"
    return Table(f"Fine-tuning, {what}", columns, rows)


def measure(short: bool) -> Findings:
    """Let all take turns."""
    torch.set_num_threads(1)
    findings = Findings(missing=missing())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(SHORT if short else FULL, Path(folder))
        findings.settings = {
            "parameters": bench.num_parameters,
            "threads": 1,
            "packed rows a step": bench.data["packed"].batch_size,
            "tokens of a row": bench.size.max_length,
            "padded documents a step": bench.data["padded"].batch_size,
            "positions of a packed token": bench.positions("packed"),
            "positions of a padded token": bench.positions("padded"),
            "steps": bench.size.steps,
            "rounds": bench.size.rounds,
        }
        findings.tables = [table(bench, lora, partial(peak, short=short)) for lora in (False, True)]
    for each in findings.tables:
        row = next(row for row in each.rows if row[0] == OURS)
        for column, mode in ((2, "packed"), (6, "padded")):
            speed = row[column]
            assert isinstance(speed, float)
            what = f"{each.title}, {mode}: speed, of the loop by hand"
            findings.targets.append(Target(what, speed, 0.99, "times", "at least"))
    return findings


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train_alone(
            sys.argv[2],
            sys.argv[3],
            bool(int(sys.argv[4])),
            bool(int(sys.argv[5])),
            Path(sys.argv[6]),
        )
    else:
        main(measure)
