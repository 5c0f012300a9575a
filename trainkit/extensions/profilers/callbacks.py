"""`trainer.profiler`: measures where the time of a fit, or of an evaluation, goes, and prints a table at
its end.

simple      each hook of each callback and of the Task, and the parts of a step, by the host's clock
advanced    each Python function of the main thread, by cProfile
pytorch     torch's operators in a few steps, and a trace of them for chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table
from torch.profiler import ProfilerActivity, profile, schedule

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.console import console_of, info, short, show_table, try_to_write
from trainkit.errors import ConfigError

_WIDTH = 118
_SHOWN = 25  # rows on the screen
# Lightning's arguments
_OF_FILES = "Leave it out: files are in <run_dir>/reports."
_PLACES = {"dirpath": _OF_FILES, "filename": _OF_FILES}
_TABLE = "Leave it out: <run_dir>/reports/profile-pytorch.txt has the operators, the longest first."
STEP = ("waiting for data", "training_step", "backward", "reduce_gradients, clip", "optimizer.step")


@checked
class SimpleProfiler(Callback):
    """Times hooks and the parts of each step on rank 0; prints a table and writes
    `<run_dir>/reports/profile-simple.txt`; of a test `profile-simple-test.txt`.

    The parts of a step are the times between its hooks, without the hooks. On a GPU the host runs
    ahead of the device: a part's time is that of queueing its work, and the device's time appears
    where the host waits for it.

    Attributes:
        seconds: (number of calls, seconds) by (owner, name).
    """

    config_key = "callbacks.profiler"
    explained_arguments: ClassVar = {
        **_PLACES,
        "extended": "Leave it out: the file has all rows, the screen the longest.",
    }

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], tuple[int, float]] = {}
        self._depth = 0
        self._in_hooks = 0.0
        self._mark: tuple[float, float] | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        self.seconds = {}
        self._mark = None
        self._file = _named("simple", stage)
        self._is_timed = trainer.is_global_zero
        self._began = time.perf_counter()
        if self._is_timed:
            trainer.hooks.wrap(self._around)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        self._mark = (time.perf_counter(), self._in_hooks)

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        self._part(0)

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        """End the forward pass."""
        self._part(1)

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        """End the backward pass."""
        self._part(2)

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """End the reduction."""
        if optimizer is trainer.optimizers[0]:
            self._part(3)

    def on_after_optimizer_step(self, trainer: RunView, task: Task) -> None:
        """End the clipping and the optimizers' update."""
        self._part(4)

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Print the table and write the file, however it ends."""
        if self.seconds:
            total_s = time.perf_counter() - self._began
            show_table(self.table(total_s, _SHOWN))
            table = self.table(total_s)
            path = trainer.run_dir / "reports" / self._file
            try_to_write(lambda: _write(path, table), f"{path.name} could not be written")

    def table(self, total_s: float, most: int | None = None) -> Table:
        """Return the timed parts, longest first;
        with `most`, that many rows and one for the others.
        """
        table = Table(
            title=f"time of the main thread, {total_s:.1f} s in all", title_justify="left"
        )
        for name in ("of", "what"):
            table.add_column(name)
        for name in ("calls", "total s", "mean us", "share"):
            table.add_column(name, justify="right")
        rows = sorted(self.seconds.items(), key=lambda item: -item[1][1])
        if most is not None and len(rows) > most + 1:
            left = rows[most:]
            sums = sum(calls for _, (calls, _) in left), sum(seconds for _, (_, seconds) in left)
            rows = [*rows[:most], (("", f"{len(left)} more (reports/{self._file})"), sums)]
        for (owner, name), (calls, seconds) in rows:
            share = f"{100 * seconds / max(total_s, 1e-9):.1f} %"
            table.add_row(
                owner, name, str(calls), f"{seconds:.3f}", f"{1e6 * seconds / calls:.0f}", share
            )
        return table

    def _around(self, owner: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if owner == type(self).__name__:
            return method

        def timed(*args: Any) -> Any:
            self._depth += 1
            begun = time.perf_counter()
            try:
                return method(*args)
            finally:
                seconds = time.perf_counter() - begun
                self._depth -= 1
                self._add(owner, name, seconds)
                if self._depth == 0:  # a hook's time includes that of hooks it calls
                    self._in_hooks += seconds

        return timed

    def _part(self, place: int) -> None:
        if not self._is_timed:
            return
        now = time.perf_counter()
        in_hooks = self._in_hooks
        if self._mark is not None:
            self._add(
                "step", STEP[place], max(0.0, now - self._mark[0] - (in_hooks - self._mark[1]))
            )
        self._mark = (now, in_hooks)

    def _add(self, owner: str, name: str, seconds: float) -> None:
        calls, before = self.seconds.get((owner, name), (0, 0.0))
        self.seconds[owner, name] = (calls + 1, before + seconds)


@checked
class AdvancedProfiler(Callback):
    """Runs cProfile on rank 0's main thread during a fit or an evaluation.

    It writes `<run_dir>/reports/profile-advanced.txt`, the functions that took most time with the
    functions they call, and `profile-advanced.prof` beside it for viewers (snakeviz, gprof2dot);
    of a test `profile-advanced-test.txt`.
    Each call of a function takes about 1 us more. Work on a GPU appears where the host waits for
    it.

    Args:
        row_limit: functions in the text.
    """

    config_key = "callbacks.profiler"
    explained_arguments: ClassVar = {
        **_PLACES,
        "line_count_restriction": "In its place: row_limit, a number of functions.",
        "dump_stats": "Leave it out: the .prof file is written.",
    }

    def __init__(self, row_limit: PositiveInt = 100) -> None:
        self.row_limit = row_limit
        self._profile: cProfile.Profile | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Start."""
        if trainer.is_global_zero:
            self._profile = cProfile.Profile()
            try:
                self._profile.enable()
            except ValueError as error:  # Python allows one profiler at a time
                raise ConfigError(
                    f"profiler=advanced: {error}. End the other profiler or debugger first."
                ) from error

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Stop, and write, however it ends."""
        profile = self._profile
        self._profile = None
        if profile is not None:
            profile.disable()
            path = trainer.run_dir / "reports" / _named("advanced", stage)
            try_to_write(lambda: self._write(profile, path), f"{path.name} could not be written")

    def _write(self, profile: cProfile.Profile, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        profile.dump_stats(path.with_suffix(".prof"))
        with path.open("w") as file:
            pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(self.row_limit)
        info(f"profile of each function: {short(path)}, {path.stem}.prof")


@checked
class PyTorchProfiler(Callback):
    """Runs torch.profiler over a few steps of each rank; in an evaluation, over a few batches.

    It writes `<run_dir>/profiler/rank-N.json.gz`, a trace of each rank, and
    `<run_dir>/reports/profile-pytorch.txt`, the operators that took most time on rank 0; of a test
    `test-rank-N.json.gz` and `profile-pytorch-test.txt`. Writing takes seconds, and training waits
    for it once.

    Args:
        wait: steps before the profiler starts.
        warmup: steps that are recorded and discarded.
        active: steps that are recorded and kept.
        row_limit: operators in the table.
    """

    config_key = "callbacks.profiler"
    explained_arguments: ClassVar = {
        **_PLACES,
        "schedule": "In its place: wait, warmup and active, in steps.",
        "export_to_chrome": "Leave it out: <run_dir>/profiler has a trace of each rank.",
        "on_trace_ready": "Leave it out: <run_dir>/profiler has a trace of each rank.",
        **dict.fromkeys(("sort_by_key", "table_kwargs", "group_by_input_shapes"), _TABLE),
    }

    def __init__(
        self,
        wait: NonNegativeInt = 5,
        warmup: NonNegativeInt = 2,
        active: PositiveInt = 5,
        row_limit: PositiveInt = 30,
    ) -> None:
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.row_limit = row_limit
        self._profile: profile | None = None
        self._done = False

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        self._start(trainer)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        self._count()

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Stop; report a run too short to record anything."""
        self._end(trainer, "the run ended before step")

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Start, unless it is a fit's validation."""
        if trainer.state.fn != "fit":
            self._start(trainer)

    def on_validation_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Count the batch."""
        if trainer.state.fn != "fit":
            self._count()

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        """Stop; report an evaluation too short to record anything."""
        if trainer.state.fn != "fit":
            self._end(trainer, "it ended before batch")

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def _start(self, trainer: RunView) -> None:
        self._done = False
        on_gpu = trainer.engine.device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=lambda ready: self._write(trainer, ready),
            record_shapes=True,
        )
        self._profile.start()

    def _count(self) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._done:
                self._stop()

    def _end(self, trainer: RunView, ended: str) -> None:
        self._stop()
        if not self._done:
            trainer.say(
                f"profiler=pytorch: {ended} {self.wait + self.warmup + 1}, the first recorded one."
                " Lower wait."
            )

    def _stop(self, *_: Any, **__: Any) -> None:
        running = self._profile
        self._profile = None
        if running is not None:
            running.stop()

    on_exception = teardown = _stop

    def _write(self, trainer: RunView, ready: profile) -> None:
        self._done = True
        stage = trainer.state.fn
        name = f"rank-{trainer.global_rank}.json.gz"
        trace = trainer.run_dir / "profiler" / (name if stage == "fit" else f"{stage}-{name}")

        def write() -> None:
            trace.parent.mkdir(exist_ok=True)
            ready.export_chrome_trace(str(trace))
            if trainer.is_global_zero:
                by = (
                    "self_cuda_time_total"
                    if trainer.engine.device.type == "cuda"
                    else "self_cpu_time_total"
                )
                text = ready.key_averages().table(
                    sort_by=by, row_limit=self.row_limit, max_name_column_width=60
                )
                table = trainer.run_dir / "reports" / _named("pytorch", stage)
                table.parent.mkdir(exist_ok=True)
                table.write_text(text)
                counted = "steps" if stage == "fit" else "batches"
                trainer.say(
                    f"profile of {self.active} {counted}: {short(table)}; traces:"
                    f" {short(trace.parent)}"
                )

        try_to_write(write, "The profile could not be written")


def _named(profiler: str, stage: str) -> str:
    """Return the name of a stage's report."""
    return f"profile-{profiler}.txt" if stage == "fit" else f"profile-{profiler}-{stage}.txt"


def _write(path: Path, table: Table) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        console_of(file, _WIDTH).print(table)
