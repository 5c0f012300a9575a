"""One problem on every engine: the largest difference of a weight from one process's.

    python -m benchmarks.parity [--steps 20] [--only NAME ...]

The gpt recipe in float32 under plain SGD, which shows a wrong scale of the gradient that Adam would
hide, with the same 24 samples a step on any number of ranks. Horovod and DeepSpeed take part if
they are installed. Exit code 1 if a difference is above 1e-6.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trainkit.checkpoint.format import read_state

MOST = 1e-6
STARTS: dict[str, tuple[int, str]] = {  # name: ranks, overrides
    "single": (1, "engine=single"),
    "horovod, 2 ranks": (2, "engine=horovod"),
    "ddp, 2 ranks": (2, "engine=ddp"),
    "ddp, 3 ranks": (3, "engine=ddp"),
    "fsdp, 1 rank": (1, "engine=fsdp"),
    "fsdp, 2 ranks": (2, "engine=fsdp"),
    "fsdp, 3 ranks": (3, "engine=fsdp"),
    "fsdp, 2 x 2 ranks": (4, "engine=fsdp engine.replicas=2"),
    "fsdp, 2 ranks, tensor": (2, "engine=fsdp engine.tensor=2"),
    "fsdp, 2 x 2 ranks, tensor": (4, "engine=fsdp engine.tensor=2"),
    "fsdp, 2 ranks, offloaded": (2, "engine=fsdp engine.cpu_offload=true"),
    "deepspeed, 2 ranks, stage 1": (2, "engine=deepspeed engine.stage=1"),
    "deepspeed, 2 ranks, stage 2": (2, "engine=deepspeed engine.stage=2"),
    "deepspeed, 2 ranks, stage 3": (2, "engine=deepspeed engine.stage=3"),
}
SETTINGS = (
    "conf=gpt optimizer=sgd optimizer.momentum=0.0 optimizer.nesterov=false optimizer.lr=0.1"
    " task.model.depth=2 task.model.width=64 task.model.heads=4 task.model.context=32"
    " data.context=32 data.batch_size=2 trainer.global_batch_size=24 trainer.lr_scaling=none"
    " trainer.gradient_clip_val=null trainer.enable_progress_bar=false"
    " trainer.enable_model_summary=false trainer.limit_val_batches=0 logger=none"
    " optimizer.weight_decay=0.0"
)


def command(ranks: int, overrides: str, steps: int, run_dir: Path) -> list[str]:
    """Return the command of a start."""
    begin = [sys.executable, "-m", "trainkit"]
    if "engine=horovod" in overrides:
        begin = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks), *begin]
    elif "engine=single" not in overrides:
        begin = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *begin[1:],
        ]
    words = [word.strip("'") for word in SETTINGS.split()]
    return [
        *begin,
        "fit",
        *words,
        *overrides.split(),
        f"trainer.max_steps={steps}",
        f"run_dir={run_dir}",
    ]


def differences(steps: int, names: list[str]) -> dict[str, float]:
    """Run the starts, and return each one's largest difference of a weight from one process's."""
    by_name: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("single", *(name for name in names if name != "single")):
            ranks, overrides = STARTS[name]
            run_dir = Path(folder, str(len(by_name)))
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command(ranks, overrides, steps, run_dir),
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            if done.returncode:
                raise SystemExit(
                    f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
                )
            state = read_state(run_dir / "checkpoints" / "last")
            if name == "single":
                expected = state
            by_name[name] = max(
                float((state[key] - value).abs().max()) for key, value in expected.items()
            )
            print(f"{name:32}{by_name[name]:.1e}", flush=True)
    return by_name


def available() -> list[str]:
    """Return the names of the starts that have their frameworks installed."""
    lacking = [name for name in ("horovod", "deepspeed") if importlib.util.find_spec(name) is None]
    return [name for name in STARTS if name.split(",")[0] not in lacking]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(STARTS), help="these starts")
    options = parser.parse_args()
    return int(max(differences(options.steps, options.only or available()).values()) > MOST)


if __name__ == "__main__":
    sys.exit(main())
