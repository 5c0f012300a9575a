"""`python -m tests.mutations [NAME ...]`: breaks trainkit in thirty ways, and sees each caught.

A mutation changes one place of a copy of the package; the tests beside it must fail then. They are
of `make test`, or of a group that a change of that file makes due. A test that no mutation fails is
not proven by this; a mutation that no test catches is a hole, and fails this command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("trainkit", "recipes", "conf", "tests", "pyproject.toml", "README.md", "docs")
LIMIT_S = 300


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: what is broken.
        path: the file, below trainkit/.
        before: the text that is replaced; once in the file.
        after: what replaces it.
        tests: pytest's arguments below tests/; at least one of them fails.
    """

    name: str
    path: str
    before: str
    after: str
    tests: str


MUTATIONS = [
    Mutation(
        "a microbatch is not weighted by its samples",
        "optim/sample_weights.py",
        "loss * (num_samples / num_in_step)",
        "loss",
        "properties/test_steps.py",
    ),
    Mutation(
        "the Task's own weights are not summed over ranks",
        "optim/sample_weights.py",
        "total = held if self._is_alone() else self._all_reduce(held)",
        "total = held",
        "properties/test_steps.py",
    ),
    Mutation(
        "the last samples of a short step are left out",
        "data/plan.py",
        "last = first + size + (1 if cell < longer else 0)",
        "last = first + size",
        "unit/data/test_plan.py",
    ),
    Mutation(
        "ranks take each other's samples too",
        "data/plan.py",
        "for cell in range(rank, cells, self.world_size):",
        "for cell in range(0, cells, self.world_size):",
        "unit/data/test_plan.py",
    ),
    Mutation(
        "all epochs have one order",
        "data/order.py",
        "generator = torch.Generator().manual_seed(mix(seed, epoch))",
        "generator = torch.Generator().manual_seed(mix(seed, 0))",
        "unit/data/test_order.py",
    ),
    Mutation(
        "augmentation does not depend on the sample",
        "data/order.py",
        "_seed(mix(seed, epoch, index))",
        "_seed(mix(seed, epoch, 0))",
        "unit/data/test_order.py unit/data/test_loader.py",
    ),
    Mutation(
        "the rate grows by the ranks without accumulation",
        "optim/batch_plan.py",
        "ratio = self.global_batch_size / self.lr_reference_batch_size",
        "ratio = self.world_size / self.lr_reference_batch_size",
        "unit/optim/test_batch_plan.py",
    ),
    Mutation(
        "warm-up begins at the scaled rate",
        "optim/batch_plan.py",
        "start = 1.0 / self.lr_factor if self.lr_factor > 1.0 else 0.0",
        "start = 1.0",
        "unit/optim/test_batch_plan.py",
    ),
    Mutation(
        "a global batch that does not divide is rounded",
        "optim/batch_plan.py",
        "if global_batch_size % one:",
        "if False:",
        "unit/optim/test_batch_plan.py",
    ),
    Mutation(
        "gradients are not clipped",
        "engine/base.py",
        "clip(self._optimizers, clip_val, clip_algorithm)\n",
        "pass\n",
        "unit/engine/test_step.py unit/optim",
    ),
    Mutation(
        "gradients are not unscaled",
        "engine/base.py",
        "self._precision.unscale(self._optimizers)",
        "pass",
        "unit/engine unit/device/test_precision.py",
    ),
    Mutation(
        "the correction of the whole step is left out",
        "optim/clipping.py",
        "torch._foreach_mul_(same, factor.to(dtype))",
        "pass",
        "unit/engine/test_step.py properties/test_steps.py",
    ),
    Mutation(
        "ranks of ddp begin with their own weights",
        "engine/ddp/engine.py",
        "self.comm.broadcast_tensors(tensors_of(task))",
        "pass",
        "parallel/test_parity.py parallel/test_runs.py",
    ),
    Mutation(
        "a parameter without a gradient on one rank is not summed",
        "engine/reduce/reducer.py",
        "unused = [p for p in unused if counts[self._place[p]] == 0]",
        "pass",
        "parallel/test_options.py parallel/test_communication.py",
    ),
    Mutation(
        "accumulated microbatches are summed each",
        "engine/reduce/reducer.py",
        "before, self._sync = self._sync, False",
        "before = self._sync",
        "unit/engine/reduce",
    ),
    Mutation(
        "the narrowed sum is divided twice",
        "engine/reduce/wire.py",
        'after = predivide if op == "average" else predivide * world_size',
        'after = 1.0 if op == "average" else predivide * world_size',
        "parallel/test_options.py",
    ),
    Mutation(
        "an overflow on another rank is not seen",
        "device/precision.py",
        "overflow.copy_(self.sum_over_ranks(overflow))",
        "pass",
        "parallel/test_tensor.py",
    ),
    Mutation(
        "the schedule counts an update that was held back",
        "loop.py",
        "    if updated:\n        run.rates.after_step(state.num_updates)\n",
        "    if True:\n        run.rates.after_step(state.num_updates)\n",
        "unit/test_loop_gradient.py",
    ),
    Mutation(
        "the hook after an update is not called",
        "loop.py",
        '        run.hooks("on_after_optimizer_step")\n',
        "",
        "unit/test_loop_hooks.py unit/test_trainer.py unit/api",
    ),
    Mutation(
        "a limit of steps is passed by one",
        "loop.py",
        "state.global_step >= limits.max_steps:",
        "state.global_step > limits.max_steps:",
        "unit/test_loop_stop.py unit/test_trainer.py",
    ),
    Mutation(
        "validation inside an epoch is left out",
        "loop.py",
        "(state.global_step if across else state.step_in_epoch) % interval == 0",
        "False",
        "unit/test_loop_stop.py unit/callbacks/test_model_checkpoint.py",
    ),
    Mutation(
        "files of a checkpoint are not flushed",
        "checkpoint/files.py",
        "os.fsync(descriptor)",
        "pass",
        "unit/checkpoint",
    ),
    Mutation(
        "a changed byte of a checkpoint passes",
        "checkpoint/files.py",
        'or sha256_of(path) != about["sha256"]',
        "",
        "unit/checkpoint",
    ),
    Mutation(
        "a checkpoint shares memory with the weights that train on",
        "checkpoint/writer.py",
        "return held.copy_(tensor, non_blocking=is_queued)",
        "return tensor",
        "unit/checkpoint/test_writer.py",
    ),
    Mutation(
        "an error of the writing thread is lost",
        "checkpoint/writer.py",
        "            self._error = error\n",
        "            pass\n",
        "unit/checkpoint/test_writer.py",
    ),
    Mutation(
        "a NaN is the best score forever",
        "callbacks/early_stopping.py",
        "or math.isnan(self.best_score)",
        "",
        "unit/callbacks/test_early_stopping.py",
    ),
    Mutation(
        "a secret of the command line is printed",
        "safety/masking.py",
        'argument = f"{key}={MASK}"',
        "pass",
        "unit/safety/test_masking.py",
    ),
    Mutation(
        "a sparse row that occurs twice is clipped as two",
        "optim/clipping.py",
        "parameter.grad = parameter.grad.coalesce()",
        "pass",
        "unit/optim/test_clipping.py",
    ),
    Mutation(
        "a signal ends a run without a checkpoint",
        "run/stopping.py",
        "written = any([policy.save_now(run) for policy in full])",
        "written = False",
        "unit/run/test_stopping.py",
    ),
    Mutation(
        "a signature of another secret is accepted",
        "extensions/elastic/signing.py",
        "return hmac.compare_digest(",
        "return bool(",
        "extensions/elastic/test_signing.py extensions/elastic/test_rendezvous.py",
    ),
]


def is_caught(mutation: Mutation, copy: Path) -> bool:
    """Return whether a test fails with it.

    Raises:
        ValueError: its text is not once in the file.
    """
    file = copy / "trainkit" / mutation.path
    text = file.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(
            f"{mutation.path} has {text.count(mutation.before)} times: {mutation.before}"
        )
    file.write_text(text.replace(mutation.before, mutation.after))
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
                *(f"tests/{argument}" for argument in mutation.tests.split()),
            ],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"  {failed[0][:160] if failed else 'NO TEST FAILED'}", flush=True)
    return done.returncode == 1 and bool(failed)


def main(names: list[str]) -> int:
    """Check all mutations, or those whose name contains one of the words; 1 if one is not caught."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for mutation in MUTATIONS:
            if names and not any(name in mutation.name for name in names):
                continue
            print(f"{mutation.name} ({mutation.path})", flush=True)
            if not is_caught(mutation, copy):
                missed.append(mutation.name)
    print(f"not caught: {'; '.join(missed)}" if missed else "each was caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
