"""The runs of an experiment: for each seed one of each side, in processes of their own.

    RUN_DIR/experiment.json            what is compared; another experiment is refused here
    RUN_DIR/seed-0/a/                  the run's folder
    RUN_DIR/seed-0/a.log, a.seen.json  its output, and its record once it has ended

A seed whose two records are there is not run again. The sides take turns in going first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.console import plural, short
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.experiment.sides import Side
from trainkit.extensions.programs.commands import first_error
from trainkit.extensions.programs.local import launcher_of, run_job, start_with
from trainkit.extensions.script.changes import Changes
from trainkit.launch.environment import without_launcher
from trainkit.safety.whole_files import replacing

_RECORDER = "trainkit.extensions.experiment.recorder.PairRecorder"
_ABOUT = "experiment.json"
_SHOWN_LINES = 8


@dataclass(frozen=True)
class SeedPair:
    """The two runs of a seed.

    Attributes:
        seed: of both.
        a: record of side a; see recorder.py. "seconds" is the time of its process.
        b: record of side b.
    """

    seed: int
    a: Mapping[str, Any]
    b: Mapping[str, Any]

    def values(self, metric: str) -> tuple[float, float]:
        """Return the last values of both sides.

        Raises:
            ConfigError: a side has not logged it.
        """
        for name, record in (("a", self.a), ("b", self.b)):
            if metric in record["not_finite"]:
                raise ConfigError(
                    f"{metric} of side {name} is not finite with seed {self.seed}, so there is"
                    " no difference to compute. Its run has diverged: lower its rate."
                )
            if metric not in record["values"]:
                logged = ", ".join(sorted(record["values"])) or "nothing"
                raise ConfigError(
                    f"metric is {metric}, which side {name} does not log for whole epochs or"
                    f" validations. It logs: {logged}. In training_step, on_epoch=True does:"
                    " the value of one step is that of one batch."
                )
        return float(self.a["values"][metric]), float(self.b["values"][metric])


@dataclass
class Seeds:
    """See the module.

    Attributes:
        a: side a.
        b: side b.
        folder: of the experiment.
        ranks: of each run.
        budget_s: seconds for the runs that are started now; None for no limit.
        left_out: seeds that the budget did not allow.
        started: seeds that were run now.
    """

    a: Side
    b: Side
    folder: Path
    ranks: int
    budget_s: float | None

    def __post_init__(self) -> None:
        self.left_out: list[int] = []
        self.started: list[int] = []
        self._began = time.monotonic()

    def claim(self) -> None:
        """Write what is compared, or compare it with what is there.

        Raises:
            ConfigError: the folder is another experiment's, or a side has changed.
        """
        about = {
            "a": [self.a.typed, self.a.digest],
            "b": [self.b.typed, self.b.digest],
            "ranks": self.ranks,
        }
        files = {**self.a.files, **self.b.files}
        path = self.folder / _ABOUT
        if path.is_file():
            earlier = json.loads(path.read_text())
            before = earlier.get("files", {})
            for name in sorted(before.keys() & files.keys()):
                if before[name] != files[name]:
                    raise ConfigError(
                        f"{short(self.folder)} holds seeds that ran before {name} was changed. Remove"
                        " the folder, or give another: run_dir=..."
                    )
            for key, value in about.items():
                if earlier.get(key) != value:
                    raise ConfigError(
                        f"{short(self.folder)} holds seeds of another experiment: {key} was"
                        f" {_shown(earlier.get(key))} and is {_shown(value)} (what it does has"
                        " changed, if the text is the same). Remove the folder, or give another:"
                        " run_dir=..."
                    )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(json.dumps({**about, "files": files}, indent=1))

    def run(self, count: int) -> Iterator[SeedPair]:
        """Yield the pair of each seed from 0 on, that were run before or are run now."""
        for seed in range(count):
            records = {name: self._seen(seed, name) for name in ("a", "b")}
            if None in records.values():
                order = (self.a, self.b) if seed % 2 == 0 else (self.b, self.a)
                for side in order:
                    if records[side.name] is None and not self.left_out:
                        records[side.name] = self._run(side, seed)
                if None in records.values():
                    self.left_out.append(seed)
                    continue
                self.started.append(seed)
            yield SeedPair(seed, records["a"] or {}, records["b"] or {})

    @property
    def left_s(self) -> float | None:
        """Seconds of the budget that are left."""
        if self.budget_s is None:
            return None
        return self.budget_s - (time.monotonic() - self._began)

    def _seen(self, seed: int, name: str) -> dict[str, Any] | None:
        path = self.folder / f"seed-{seed}" / f"{name}.seen.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _run(self, side: Side, seed: int) -> dict[str, Any] | None:
        """Run a side with a seed; return its record, or None if the budget has ended."""
        left = self.left_s
        if left is not None and left <= 0:
            return None
        folder = self.folder / f"seed-{seed}"
        run_dir = folder / side.name
        log = folder / f"{side.name}.log"
        shutil.rmtree(run_dir, ignore_errors=True)  # of a run that did not end
        folder.mkdir(exist_ok=True)
        draft = folder / f"{side.name}.draft.json"
        recorder = {"_target_": _RECORDER, "path": str(draft)}
        changes = Changes(
            str(run_dir),
            {"seed": seed},
            {"experiment": recorder},
            checkpoints_to=str(run_dir / "kept-by"),
        )
        engine = side.subject.engine_name
        start = start_with(launcher_of(engine), self.ranks, engine)
        line = [*start, *side.subject.line(changes, folder, f"{side.name}.changes")]
        what = f"seed {seed}, {side.name}: {side.typed}, {plural(self.ranks, 'rank')}"
        print(f"{what} ...", end=" ", flush=True)
        began = time.monotonic()
        try:
            code = run_job(line, log, without_launcher(os.environ), left)
        except subprocess.TimeoutExpired:
            print("ended by the budget", flush=True)
            shutil.rmtree(run_dir, ignore_errors=True)
            return None
        seconds = time.monotonic() - began
        print(f"{seconds:.0f} s", flush=True)
        if code != 0 or not draft.is_file():
            lines = log.read_text(errors="replace").splitlines()
            shown = "".join(f"\n  {line}" for line in [*first_error(lines), *lines[-_SHOWN_LINES:]])
            raise (ConfigError if code == ConfigError.exit_code else EngineError)(
                f"{what} failed (exit code {code}):{shown}\nIts full output: {log}"
            )
        record = {**json.loads(draft.read_text()), "seconds": seconds}
        with replacing(folder / f"{side.name}.seen.json") as whole:
            whole.write_text(json.dumps(record))
        draft.unlink()
        return record


def _shown(value: Any) -> str:
    return repr(value[0]) if isinstance(value, list) else repr(value)
