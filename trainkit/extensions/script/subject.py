"""The fit that a command looks at, of a config or of a script: how it is described, made again with
another microbatch or engine, and started again in processes of its own.

Subject         what both have
ConfigSubject   of conf=NAME and overrides
ScriptSubject   of a script, which is stopped at its fit
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from trainkit.arguments import given_to, show
from trainkit.config.compose import ComposedJob
from trainkit.config.instantiate import build
from trainkit.config.roles import declared_engine, role_of
from trainkit.config.signature import read_signature
from trainkit.data.splitting import loader_like
from trainkit.engine.base import Engine
from trainkit.engine.select import make_engine
from trainkit.errors import ConfigError
from trainkit.extensions.by_hand.task import LoopTask
from trainkit.extensions.find.trial_run import trial_task
from trainkit.extensions.script.changes import Changes
from trainkit.extensions.script.command_line import Script
from trainkit.extensions.script.loaders import ChangedLoader
from trainkit.run.around_fit import RequestedFit
from trainkit.run.build import StartFrom
from trainkit.run.data_sources import DataSources

_CHILD = "trainkit.extensions.script.child"


class Subject(ABC):
    """See the module.

    Attributes:
        of: names it: "conf=mlp", "mine.py".
        typed: the arguments that start it: overrides, or a script and its arguments.
        nodes: parts of a config that name things: task, data, vars; empty of a script.
        engine: options of the engine, by name.
        engine_name: of the engine; "auto" for the launcher's, "" for a class that says none.
        run_dir: the folder in which a command that writes leaves its files.
        batch_size_key: how the user writes the microbatch of a rank.
        workers_key: how the user writes the loader's workers.
        note: a sentence on runs of it that a command starts; "" for none.
    """

    of: str
    typed: str
    nodes: Mapping[str, Any] = {}
    engine: Mapping[str, Any] = {}
    engine_name: str = "auto"
    run_dir: str = ""
    note: str = ""
    batch_size_key: str = "batch_size"
    workers_key: str = "num_workers"

    @property
    @abstractmethod
    def requested(self) -> RequestedFit:
        """The task, data and settings; built when they are first asked for."""

    @property
    def is_loop(self) -> bool:
        """Whether the user's own loop reads the batches."""
        return isinstance(self.requested.task, LoopTask)

    @property
    @abstractmethod
    def global_batch_size(self) -> int | None:
        """Samples of a step on all ranks, if the user has set them."""

    @abstractmethod
    def limits(self) -> tuple[str | None, int | None, bool]:
        """Return the checkpoint that it resumes, its last step, and whether it is a quick trial
        (fast_dev_run); None where there is none.
        """

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples of a rank's microbatch, where it can be changed.

        Raises:
            ConfigError: it cannot; the message says what to write.
        """

    @abstractmethod
    def with_batch_size(self, size: int, accumulate: int | None = None) -> RequestedFit:
        """Return a fit made again, with another microbatch.

        Args:
            accumulate: microbatches of a step in place of a global batch; None: as it is.
        """

    @abstractmethod
    def with_engine(self, **options: Any) -> RequestedFit:
        """Return a fit made again, with other options of the engine."""

    @abstractmethod
    def rate_text(self, rate: float) -> str:
        """Return what to type, or where to write, for a learning rate."""

    @abstractmethod
    def engine_text(self, options: Mapping[str, Any]) -> str:
        """Return what to type, or where to write, for options of the engine; "" for none."""

    def key(self, name: str) -> str:
        """Return how the user writes a setting: `trainer.max_steps`, or `max_steps` of a script."""
        return name

    @abstractmethod
    def line(self, changes: Changes, folder: Path, name: str) -> list[str]:
        """Return the arguments of Python that run it with changes.

        Args:
            folder: for a file of the run's changes.
            name: of the run, in that folder.
        """


class ConfigSubject(Subject):
    """See the module.

    Args:
        job: composed and checked.
        overrides: as typed.
    """

    def __init__(self, job: ComposedJob, overrides: Sequence[str]) -> None:
        self._job = job
        self._overrides = list(overrides)
        self.config = job.config
        self.of = f"conf={job.config.get('conf')}"
        self.typed = " ".join(overrides)
        self.nodes = {key: self.config.get(key) for key in ("task", "data", "vars")}
        self.engine = dict(self.config.get("engine") or {})
        self.engine_name = declared_engine(self.config)
        self.run_dir = str(self.config["run_dir"])
        self.batch_size_key = "data.batch_size"
        self.workers_key = "data.num_workers"

    @cached_property
    def requested(self) -> RequestedFit:
        return self._built(self.config)

    def _built(self, config: dict[str, Any]) -> RequestedFit:
        built = build(config, [], self._job.recorded)
        data = DataSources(datamodule=built.datamodule)
        ckpt_path = config.get("ckpt_path")
        if config.get("resume"):
            ckpt_path = f"auto:{ckpt_path}" if ckpt_path else "auto"
        start = StartFrom(ckpt_path, config.get("init_weights"), config.get("strict", True))
        trainer = built.trainer
        return RequestedFit(built.task, data, start, trainer.options, trainer.callbacks)

    @property
    def global_batch_size(self) -> int | None:
        size: int | None = self.config["trainer"].get("global_batch_size")
        return size

    def limits(self) -> tuple[str | None, int | None, bool]:
        trainer = self.config["trainer"]
        limit = None if trainer.get("max_steps") == -1 else trainer.get("max_steps")
        return self.config.get("ckpt_path"), limit, bool(trainer.get("fast_dev_run"))

    @property
    def batch_size(self) -> int:
        data = self.config.get("data") or {}
        size = data.get("batch_size")
        if not isinstance(size, int):
            raise ConfigError(_without_batch_size(data))
        return size

    def with_batch_size(self, size: int, accumulate: int | None = None) -> RequestedFit:
        trainer = dict(self.config["trainer"])
        if accumulate is not None:
            trainer |= {"global_batch_size": None, "accumulate_grad_batches": accumulate}
        data = {**self.config["data"], "batch_size": size}
        return self._built({**self.config, "trainer": trainer, "data": data})

    def with_engine(self, **options: Any) -> RequestedFit:
        return self._built({**self.config, "engine": {**self.engine, **options}})

    def rate_text(self, rate: float) -> str:
        key = _rate_key(self.config)
        return f"{key}={rate:.2g}" if key else "in configure_optimizers"

    def engine_text(self, options: Mapping[str, Any]) -> str:
        return " ".join(f"engine.{option}={value}" for option, value in options.items())

    def key(self, name: str) -> str:
        return f"trainer.{name}"

    def line(self, changes: Changes, folder: Path, name: str) -> list[str]:
        settings = dict(changes.all_settings)
        overrides = [*self._overrides]
        if "engine" in settings:
            overrides = [word for word in overrides if not word.lstrip("+~").startswith("engine")]
            overrides.append(f"engine={settings.pop('engine')}")
        if "seed" in settings:
            overrides.append(f"seed={settings.pop('seed')}")
        overrides += [f"trainer.{key}={_value(value)}" for key, value in settings.items()]
        overrides += self._logger_overrides(changes)
        if changes.checkpoints_to:
            overrides += [
                f"callbacks.{key}.dirpath='{changes.checkpoints_to}/{key}'"
                for key, node in (self.config.get("callbacks") or {}).items()
                if role_of(node) == "checkpoints" and node.get("dirpath")
            ]
        overrides += [
            f"++callbacks.{key}.{option}={_value(value)}"
            for key, node in changes.callbacks.items()
            for option, value in node.items()
        ]
        if changes.batch_size is not None:
            overrides.append(f"{self.batch_size_key}={changes.batch_size}")
        overrides.append(f"run_dir='{changes.run_dir}'")
        if changes.ckpt_path is not None:  # the resumed run takes its checkpoint alone
            others = [key for key in ("resume", "init_weights") if self.config.get(key)]
            overrides += [f"ckpt_path={changes.ckpt_path}", *(f"{key}=null" for key in others)]
        return ["-m", "trainkit", "fit", *overrides]

    def _logger_overrides(self, changes: Changes) -> list[str]:
        loggers: Mapping[str, Any] = self.config.get("logger") or {}
        tables = [name for name, node in loggers.items() if role_of(node) == "metrics_table"]
        stay = tables if changes.loggers == "csv" else []
        removed = [f"~logger.{name}" for name in loggers if name not in stay]
        if changes.loggers == "csv" and not tables:
            removed.append("++logger.csv._target_=trainkit.loggers.CSVLogger")
        return removed


class ScriptSubject(Subject):
    """See the module.

    Args:
        script: that has asked for the fit.
        requested: the fit.
        run_dir: for a command's files.
    """

    def __init__(self, script: Script, requested: RequestedFit, run_dir: str) -> None:
        self._script = script
        self._requested = requested
        self.of = script.name
        self.typed = " ".join([script.path, *script.arguments])
        engine = requested.options.engine
        self.engine = {} if isinstance(engine, str) else given_to(engine)
        self.engine_name = engine if isinstance(engine, str) else engine.name
        self.run_dir = run_dir
        self.note = (
            f"Random numbers are seeded before {script.name} begins, so that weights which it draws"
            " without a seed of its own are the same in each run."
        )

    @property
    def requested(self) -> RequestedFit:
        return self._requested

    @property
    def global_batch_size(self) -> int | None:
        return self._requested.options.batch.global_batch_size

    def limits(self) -> tuple[str | None, int | None, bool]:
        options = self._requested.options
        start = self._requested.start.ckpt_path
        return start, options.limits.max_steps, bool(options.fast_dev_run)

    @property
    def batch_size(self) -> int:
        loader = self._loader()
        if loader.batch_size is None:
            raise ConfigError(
                f"The DataLoader of {self.of} has a batch_sampler of its own, so no other batch size"
                " can be tried. Give it batch_size=... and a sampler or shuffle=True."
            )
        return loader.batch_size

    def _loader(self) -> DataLoader[Any]:
        loader = self._requested.data.find("train", self._requested.task)
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"The training data of {self.of} is a {type(loader).__name__}, whose batches cannot"
                " be made larger. Pass a torch.utils.data.DataLoader to fit."
            )
        return loader

    def with_batch_size(self, size: int, accumulate: int | None = None) -> RequestedFit:
        options = self._requested.options
        if accumulate is not None:
            batch = replace(
                options.batch, global_batch_size=None, accumulate_grad_batches=accumulate
            )
            options = replace(options, batch=batch)

        def resized(loader: DataLoader[Any]) -> DataLoader[Any]:
            return loader_like(
                loader,
                loader.dataset,
                batch_size=size,
                sampler=loader.sampler,
                drop_last=loader.drop_last,
            )

        data = ChangedLoader(self._requested.data.given, self._requested.data.datamodule, resized)
        return replace(self._copied(), data=data, options=options)

    def with_engine(self, **options: Any) -> RequestedFit:
        engine = self._requested.options.engine
        made: Engine = (
            make_engine(engine, **options)
            if isinstance(engine, str)
            else type(engine)(**{**self.engine, **options})
        )
        asked = self._copied()
        return replace(asked, options=replace(asked.options, engine=made))

    def _copied(self) -> RequestedFit:
        return replace(self._requested, task=trial_task(self._requested.task))

    def rate_text(self, rate: float) -> str:
        return f"lr={rate:.2g} of the optimizer in {self.of}"

    def engine_text(self, options: Mapping[str, Any]) -> str:
        given = " ".join(f"{option}={value}" for option, value in options.items())
        return f"{given} of the engine in {self.of}" if given else ""

    def line(self, changes: Changes, folder: Path, name: str) -> list[str]:
        path = folder / f"{name}.json"
        changes.write(path)
        return ["-m", _CHILD, str(path), self._script.path, *self._script.arguments]


def _value(value: Any) -> str:
    """Return a value as Hydra reads it."""
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def _without_batch_size(data: Mapping[str, Any]) -> str:
    if data.get("batch_size") is not None:
        return (
            f"data.batch_size is {show(data['batch_size'])}; it must be a whole number, 1 or more."
        )
    target = data.get("_target_")
    if target is None:
        return (
            "This config has no data, so its task makes the loaders itself, and no data.batch_size "
            "can be tried. Give the data as a DataModule: data._target_=MODULE.CLASS."
        )
    if "batch_size" not in read_signature(str(target), "data._target_").parameters:
        return (
            f"data._target_ is '{target}', which takes no batch_size, so none can be tried. Give"
            " its __init__ an argument batch_size, and its loaders that size."
        )
    return (
        "data.batch_size is not in this config, which leaves it to the class's default. Give the"
        " size to begin with: data.batch_size=32."
    )


def _rate_key(config: Mapping[str, Any]) -> str | None:
    """Return the key that sets a config's learning rate:
    the optimizer's, or an argument of the task's own; or None.
    """
    if config.get("optimizer"):
        return "optimizer.lr"
    task = config["task"]
    known = read_signature(task["_target_"], "task._target_").parameters | task
    numbers = (
        n
        for n in ("lr", "learning_rate")
        if n in known and isinstance(task.get(n, 0.0), (int, float))
    )
    return next((f"task.{name}" for name in numbers), None)
