"""How long one waits before anything happens: imports, commands, and the time from a command to the
end of the first step.

    python -m benchmarks.startup [--short] [--json FILE]

imports     seconds that a line adds to `import torch`, in a new process
commands    seconds of whole commands, and whether torch was imported in them
first step  seconds from the start of the process to the end of its first optimizer step: an MLP
16-32-4 on one batch in
            memory, by each trainer (peers.py), and by `python -m trainkit fit conf=mlp` with all
            that it ships

All are processes of their own, one thread each, in turn; a figure is the median over rounds.
Bytecode is on disk and files are in the page cache, as at the second start on a machine. Each
trainer's process also imports the harness (20 ms, for rich).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Findings, Table, Target, absent, main, median, median_ratio
from benchmarks.processes import answer, environment, in_turns

IMPORTS = {
    "trainkit": "from trainkit import Callback, DataModule, Task, Trainer",
    "trainkit, every name": "from trainkit import *",
    "pytorch-ignite": "from ignite.engine import Engine, Events",
    "Fabric": "from lightning.fabric import Fabric",
    "Accelerate": "from accelerate import Accelerator",
    "Lightning": "from lightning import LightningDataModule, LightningModule, Trainer",
}
MODULES = {
    "pytorch-ignite": "ignite",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
}
HELP = "trainkit --help"
MISTAKE = "trainkit fit conf=resnet50 trainer.max_epoch=3"
FIT_HELP = "trainkit fit --help"
COMMANDS = (HELP, MISTAKE, FIT_HELP)
BARE, OURS, COMMAND = "bare loop", "trainkit", "trainkit fit conf=mlp"


def import_seconds(line: str) -> list[float]:
    """Return the seconds that a line takes once torch is there."""
    code = (
        f"import time, torch; before = time.perf_counter(); {line}; print(time.perf_counter() -"
        " before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [float(done.stdout)]


def command_seconds(command: str) -> list[float]:
    """Return the seconds of a command from its start to its end."""
    before = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", *command.split()],
        env=environment(),
        capture_output=True,
        check=False,
        timeout=100,
    )
    return [time.perf_counter() - before]


def imports_torch(command: str) -> bool:
    """Return whether torch is imported in a command;
    by Python's own log, in a run that is not timed.
    """
    line = [sys.executable, "-X", "importtime", "-m", *command.split()]
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, check=False, timeout=100
    )
    names = {
        text.rpartition("|")[2].strip()
        for text in done.stderr.splitlines()
        if text.startswith("import time:")
    }
    assert "trainkit.errors" in names, done.stderr  # else the log was not read
    return "torch" in names


def first_step_seconds(name: str) -> list[float]:
    """Return the seconds from the start of a trainer's process to the end of its first step."""
    before = time.monotonic()  # one clock for all processes
    return [answer("benchmarks.startup", "--first-step", name, env=environment()) - before]


def train_one_step(name: str, out: Path) -> None:
    """Train as a contender, in its own process; write when the first step has ended."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    moments: list[float] = []
    register_optimizer_step_post_hook(lambda *_: moments.append(time.monotonic()))
    if name == COMMAND:
        from trainkit.__main__ import main as command_line

        with tempfile.TemporaryDirectory() as folder:
            sys.argv[1:] = [*COMMAND.split()[1:], "trainer.max_steps=1", f"run_dir={folder}"]
            assert command_line() == 0
    else:
        from benchmarks.peers import LOOPS, Job, sgd, tiny_batches, tiny_mlp

        LOOPS[name](Job(tiny_mlp, sgd, tiny_batches(1)))
    out.write_text(json.dumps(moments[0]))


def measure(short: bool) -> Findings:
    """Take the three in turn."""
    from benchmarks.peers import LOOPS, missing, present

    rounds = 0 if short else 3
    without = {name: why for name, why in missing().items() if name in LOOPS}
    lines = {name: line for name, line in IMPORTS.items() if name not in absent(MODULES)}
    imports = in_turns(
        {name: lambda line=line: import_seconds(line) for name, line in lines.items()}, rounds
    )
    commands = in_turns(
        {command: lambda command=command: command_seconds(command) for command in COMMANDS}, rounds
    )
    with_torch = {command: imports_torch(command) for command in COMMANDS}
    names = [*(name for name in present(LOOPS) if name == BARE or name in IMPORTS), COMMAND]
    steps: dict[str, Callable[[], list[float]]] = {
        name: lambda name=name: first_step_seconds(name) for name in names
    }
    first = in_turns(steps, rounds)
    return Findings(
        [
            Table(
                "on top of `import torch`, s",
                ["", "s"],
                [[name, median(taken)] for name, taken in imports.items()],
            ),
            Table(
                "commands, s",
                ["python -m", "s", "imports torch"],
                [
                    [command, median(taken), "yes" if with_torch[command] else "no"]
                    for command, taken in commands.items()
                ],
            ),
            Table(
                "from command to the end of the first step, s",
                ["", "s", "of the bare loop's"],
                [
                    [name, median(taken), median_ratio(taken, first[BARE])]
                    for name, taken in first.items()
                ],
            ),
        ],
        [
            Target(f"`{IMPORTS[OURS]}` on top of `import torch`", median(imports[OURS]), 0.3, "s"),
            *(
                Target(f"`python -m {command}`", median(commands[command]), 0.5, "s")
                for command in (HELP, MISTAKE)
            ),
            Target(
                "of these two import torch", with_torch[HELP] + with_torch[MISTAKE], 0, "commands"
            ),
        ],
        without,
        {"threads": 1, "rounds": rounds},
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-step"]:
        train_one_step(sys.argv[2], Path(sys.argv[3]))
    else:
        main(measure)
