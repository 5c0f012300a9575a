"""trial: a run of trainkit as a trainable of Ray Tune; keys of `param_space` are overrides of its
config.

    tuner = tune.Tuner(trial(["conf=mlp"]), param_space={"optimizer.lr": tune.loguniform(1e-4,
    1e-1)}, tune_config=...)

A trial is an actor that starts the run in a process of its own, passes its reports to Tune, and
ends with it.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.arguments import show
from trainkit.console import warning
from trainkit.errors import ConfigError, TrainkitError
from trainkit.extensions.jobs.overrides import override
from trainkit.extensions.ray.connection import folder_of, load_ray
from trainkit.extensions.ray.options import options_of
from trainkit.extensions.ray.tuning.job import END_S, TrialJob, run_job

_THREAD = "trainkit trial"
_STARTED_FROM = "started_from"  # in a run's folder: a checkpoint that was downloaded
_LINES = 12  # of a job's output, for an error that is no error of trainkit's


class TrialError(TrainkitError):
    """The run of a trial failed."""


def trial(
    overrides: Sequence[str],
    num_workers: int = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    metric: str | None = None,
    folder: str | Path | None = None,
) -> Any:
    """Return a trainable for `ray.tune.Tuner` that runs `python -m trainkit fit` with these
    overrides and a trial's values.

    Each validation is reported with all logged values, `epoch`, `step` and a checkpoint. A trial
    that Tune starts from a checkpoint (PBT, a search that resumes) continues there with its own
    values.

    Args:
        overrides: as typed after `fit`, as ["conf=mlp", "trainer.max_epochs=5"].
        num_workers: ranks of a trial, 1 or more; several are Horovod's, each in a bundle of the
            trial's placement group.
        resources_per_worker: of each rank; {"CPU": 1} by default.
        metric: a value that each run must log, or it ends with an error that names the values that
            it has.
        folder: holds a folder for each trial, by number: on several nodes a shared one. By default
            each run is in Tune's folder of the trial, below /tmp/ray of its node, of which only the
            reported checkpoints come to Tune's storage.

    Raises:
        ConfigError: Ray is not installed, an argument is not legal, or an override is of what a
            trial sets itself: run_dir, launcher.
    """
    tune = load_tune()
    resources = dict(options_of("", num_workers, resources_per_worker).resources)
    if not isinstance(num_workers, int):
        raise ConfigError(
            f"num_workers is {show(num_workers)}; a trial has a fixed number of ranks, 1 or more."
        )
    if not any(word.startswith("conf=") for word in overrides):
        raise ConfigError("trial: conf=NAME is missing in the overrides; as trial(['conf=mlp']).")
    _refuse_own(overrides)
    report = ["_target_: trainkit.callbacks.TuneReport", *([f"metric: {metric}"] if metric else [])]
    arguments = [*overrides, f"callbacks.tune={{{', '.join(report)}}}"]
    place = None if folder is None else str(Path(folder).absolute())
    start = functools.partial(
        _run,
        arguments=arguments,
        cwd=os.getcwd(),
        folder=place,
        num_workers=num_workers,
        resources=resources,
        path=_python_path(),
    )
    start.__name__ = "fit"  # type: ignore[attr-defined]  # in the names of Tune's folders
    trainable = _with_patience(start)
    # the first one is the trial's own
    bundles = [resources] if num_workers == 1 else [{}, *[resources] * num_workers]
    return tune.with_resources(trainable, tune.PlacementGroupFactory(bundles))


def _refuse_own(overrides: Sequence[str]) -> None:
    """Refuse overrides of what a trial sets itself.

    Raises:
        ConfigError: the run's folder or a launcher is given.
    """
    for word in overrides:
        key = word.lstrip("+").partition("=")[0]
        if key == "run_dir":
            raise ConfigError(
                "trial: run_dir is given, and a trial's run has a folder of its own, of which"
                " several would be one. Leave it out, or give the folder of all trials:"
                " trial(..., folder=...)."
            )
        if key.partition(".")[0] == "launcher" and word != "launcher=none":
            raise ConfigError(
                f"trial: {key} is given, and Tune starts the trials: ranks of a launcher would"
                " wait for what the trials hold. Leave it out, and give trial(num_workers=N) for"
                " trials of several ranks."
            )


def _with_patience(start: Any) -> Any:
    """Return the function as a trainable that ends once its job has ended.

    A trial that the scheduler ends would be killed in the middle of it: Tune's own trainable does
    not wait for its thread.
    """
    wrap = importlib.import_module("ray.tune.trainable.function_trainable").wrap_function

    class Trial(wrap(start)):  # type: ignore[misc]
        """See _with_patience."""

        def cleanup(self) -> None:
            try:
                super().cleanup()
            finally:
                for thread in threading.enumerate():
                    if thread.name == _THREAD:
                        thread.join(END_S)

    Trial.__name__ = start.__name__
    return Trial


def load_tune() -> Any:
    """Return ray.tune.

    Raises:
        ConfigError: it is not installed.
    """
    return load_ray("ray.tune", "A search")


def _run(
    config: dict[str, Any],
    arguments: Sequence[str],
    cwd: str,
    folder: str | None,
    num_workers: int,
    resources: Mapping[str, float],
    path: str,
) -> None:
    """Run a trial, in its actor."""
    threading.current_thread().name = _THREAD
    tune = load_tune()
    ray = importlib.import_module("ray")
    context = tune.get_context()
    run_dir = (
        Path(context.get_trial_dir()) / "run"
        if folder is None
        else Path(folder) / number_of(context.get_trial_id())
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    own = [override(key, value) for key, value in config.items()]
    if "conf" in config:  # the search is over configs
        arguments = [word for word in arguments if not word.startswith("conf=")]
    started_from = tune.get_checkpoint()
    if folder is None and started_from is None and number_of(context.get_trial_id()) == "0":
        _say_if_scattered(ray)
    if started_from is not None:
        begins_at = folder_of(started_from, run_dir / _STARTED_FROM)  # all ranks read it
        own += [override("ckpt_path", begins_at), "resume=null"]
    own.append(override("run_dir", str(run_dir)))
    output = run_dir / "output.txt"
    host = ray.util.get_node_ip_address()
    place = Path(cwd) if Path(cwd).is_dir() else run_dir
    job = TrialJob([*arguments, *own], place, output, num_workers, resources, host)
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }

    def report(metrics: dict[str, Any], checkpoint: str | None) -> bool:
        tune.report(
            metrics,
            checkpoint=None if checkpoint is None else tune.Checkpoint.from_directory(checkpoint),
        )
        return True

    size = output.stat().st_size if output.exists() else 0
    try:
        code = run_job(job, environ, report)
    finally:
        shutil.rmtree(run_dir / _STARTED_FROM, ignore_errors=True)
    if code != 0:
        error = error_in(output.read_text(errors="replace")[size:], code)
        sweep: Any = importlib.import_module("trainkit.config.sweep")
        sweep.record_failure(run_dir, error, job.arguments)
        raise TrialError(error)


def _say_if_scattered(ray: Any) -> None:
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1:
        warning(
            f"trial: each run's folder is below /tmp/ray of the node that trains it, of {nodes}, and"
            " only the reported checkpoints come to Tune's storage. For metrics, logs and configs"
            " give a folder that all nodes share: trial(..., folder=...)."
        )


def number_of(trial_id: str) -> str:
    """Return a trial's number in its search, from its id."""
    return str(int(match.group(1))) if (match := re.search(r"_(\d+)$", trial_id)) else trial_id


def error_in(text: str, code: int) -> str:
    """Return why a run failed, from what it printed: its error, or the last lines."""
    # the ranks' prefixes
    plain = re.sub(r"^\[[^\]\n]*\]<std(?:out|err)>:", "", text, flags=re.MULTILINE)
    plain = "\n".join(line for line in plain.splitlines() if not line.startswith("[elastic] "))
    if errors := list(re.finditer(r"^Error(?: on rank [^:\n]*)?: ", plain, re.MULTILINE)):
        return plain[errors[-1].end() :].strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join([f"the run ended with exit code {code}:", *lines[-_LINES:]])


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "")
