"""Extensions: what a user asks for by name, beside the core; this file is the one door through
which the core finds them.

extensions   trainkit's own (trainkit/extensions/), then those of installed packages
find         who brings a name: a command, an engine
resolve      the object of a dotted name

An extension has dotted names: nothing of it is imported before a user asks for it. No torch here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainkit.errors import ConfigError, clause

GROUP = "trainkit.extensions"  # of entry points, and the package of trainkit's own

Kind = Literal["commands", "engines", "layouts", "communications", "precisions", "data_sets"]


@dataclass(frozen=True)
class Command:
    """A command of `python -m trainkit`.

    Attributes:
        summary: its line in `python -m trainkit --help`.
        main: dotted name of a function of (command, arguments) that returns the exit code.
        usage: dotted name of its Usage, for --help and tab completion; "": `main` answers --help
            itself.
    """

    summary: str
    main: str
    usage: str = ""


@dataclass(frozen=True)
class Usage:
    """The arguments of a command.

    Attributes:
        line: the arguments, as typed.
        about: what the command does.
        options: of key=value (or --flag): name, type, default ("": it must be given), meaning.
        examples: arguments, as typed.
        takes_config: whether conf=NAME and overrides may follow.
        takes_run: whether a run's folder is an argument.
        parts: its sub-commands, one of which comes first: "lr" of `find lr`.
    """

    line: str
    about: str
    options: tuple[tuple[str, str, str, str], ...] = ()
    examples: tuple[str, ...] = ()
    takes_config: bool = False
    takes_run: bool = False
    parts: tuple[str, ...] = ()

    def keys(self) -> dict[str, str]:
        """Return name -> meaning of the key=value options."""
        return {name: text for name, _, _, text in self.options if not name.startswith("-")}


@dataclass(frozen=True)
class EngineEntry:
    """An engine by its name, as in Trainer(engine="NAME").

    Attributes:
        target: dotted name of the class, a trainkit.engine.base.Engine.
        package: the Python package that it needs; "" for none.
        title: how messages call that package.
        install: a sentence: how a user installs it.
        options: arguments of its constructor that other engines lack.
        elsewhere: why other engines lack them; "": they are this engine's.
        lacking: argument of other engines -> why it has no effect in this one.
    """

    target: str
    package: str = ""
    title: str = ""
    install: str = ""
    options: tuple[str, ...] = ()
    elsewhere: str = ""
    lacking: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """The result of one check of `trainkit doctor`.

    Attributes:
        area: its group: "software", "Horovod", ...
        name: the checked thing.
        value: what there is, for people.
        status: "ok"; "warning": it works, but could be better; "wrong": something will not work.
        why: the consequence; "" if all is well.
        remedy: a command if there is one.
    """

    area: str
    name: str
    value: str
    status: Literal["ok", "warning", "wrong"] = "ok"
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Extension:
    """A feature beside the core, with all that it brings.

    Attributes:
        name: one word, as `python -m trainkit extensions` lists it.
        summary: one line.
        proven: how far it is tested: "each commit", "nightly", "not on a GPU yet", ...
        commands: name -> Command. "data NAME" is a part of the command `data`.
        engines: name -> EngineEntry.
        layouts: option of engine=fsdp -> dotted name of the class by which it splits a model; what
            the engine asks of it is in FSDPEngine (`_stages`).
        communications: name, as in communication=NAME -> dotted name of the class of its settings
            (trainkit.engine.step_settings.Communication).
        precisions: name, as trainer.precision=NAME -> dotted name of a device.precision.Precision
        data_sets: package of a data set that takes its part by itself -> dotted name of a function
            of (data, its name, the engine) that returns what this rank reads; all ranks call it.
        targets: dotted names of classes and functions that a config may build: callbacks, loggers,
            launchers, data, ...
        ranks: variable that a launcher sets in the environment of a rank of engine=horovod -> dotted
            name of a function of trainkit.launch.environment.Launcher that returns the ranks
            (trainkit.engine.ranks.Ranks).
        clusters: dotted names of trainkit.launch.jobs.Cluster classes, which `trainkit jobs` asks
            in the order of extensions.
        checks: dotted names of functions without arguments that yield doctor's findings
            (Finding).
        url_store: dotted name of the trainkit.checkpoint.store.Store of checkpoints at URLs; "" for
            none.
        conf: the package whose folder conf/ holds config groups; "" for none.
        names: public dotted name, or one of earlier versions -> where the object is. Configs and
            imports may use both.
        advice: where users of another framework look for its names, a module of the core,
            "Trainer", "flags", "modules", "_target_" -> dotted name of a mapping of name -> what to
            use here, in sentences.
        features: dotted names of functions of a trainkit.run.setup.Stage that return a
            trainkit.run.feature.Feature of the fit or the evaluation, or None.
        remarks: dotted names of functions of a trainkit.api.view.RunView that yield sentences, which
            a fit prints as it begins.
        source: the distribution that it comes from; trainkit sets it.
    """

    name: str
    summary: str
    proven: str
    commands: Mapping[str, Command] = field(default_factory=dict)
    engines: Mapping[str, EngineEntry] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    communications: Mapping[str, str] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)
    data_sets: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    ranks: Mapping[str, str] = field(default_factory=dict)
    clusters: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    url_store: str = ""
    conf: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    source: str = "trainkit"


@dataclass(frozen=True)
class BrokenExtension:
    """An entry point that could not be read.

    Attributes:
        name: of the entry point.
        source: the distribution that declares it.
        error: why.
    """

    name: str
    source: str
    error: str


def extensions() -> tuple[Extension, ...]:
    """Return all extensions: trainkit's own, then those of installed packages by name."""
    return (*_own(), *(each for each in _installed() if isinstance(each, Extension)))


def broken() -> tuple[BrokenExtension, ...]:
    """Return the entry points of installed packages that could not be read."""
    return tuple(each for each in _installed() if isinstance(each, BrokenExtension))


def names(kind: Kind) -> list[str]:
    """Return the names of a kind that extensions bring, in their order."""
    return list(
        dict.fromkeys(name for extension in extensions() for name in getattr(extension, kind))
    )


def find(kind: Kind, name: str, own: Mapping[str, Any]) -> Any:
    """Return the core's own value of a name, or what an extension brings under it; None if there is
    none.

    Args:
        kind: the field of Extension.
        name: of a command or an engine.
        own: those of the core.

    Raises:
        ConfigError: two bring it.
    """
    bringers = [extension for extension in extensions() if name in getattr(extension, kind)]
    sources = ["trainkit itself"] * (name in own) + [
        f"the extension {each.name} (of {each.source})" for each in bringers
    ]
    if len(sources) > 1:
        raise ConfigError(
            f"'{name}' is among the {kind} of {' and of '.join(sources)}. Uninstall one of the"
            " packages: `python -m trainkit extensions` lists them."
        )
    return own[name] if name in own else getattr(bringers[0], kind)[name] if bringers else None


def engines() -> list[tuple[str, EngineEntry]]:
    """Return the engines that extensions bring, each with its name; two may have the same."""
    return [pair for extension in extensions() for pair in extension.engines.items()]


def resolve(target: str) -> Any:
    """Import and return the object of a dotted name."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def url_store() -> Any:
    """Return the class of stores of checkpoints at URLs; None if no extension has one."""
    places = [extension.url_store for extension in extensions() if extension.url_store]
    return resolve(places[0]) if places else None


def targets() -> frozenset[str]:
    """Return the dotted names that configs may build since an extension brings them."""
    return frozenset(target for extension in extensions() for target in extension.targets) | {
        engine.target for _, engine in engines()
    }


def current_name(target: str) -> str:
    """Return where the object of a public or an earlier dotted name is;
    the name itself if no extension has it.
    """
    for extension in extensions():
        if target in extension.names:
            return extension.names[target]
    return target


def with_current_names(config: Any) -> Any:
    """Return a config, of mappings and lists, with each `_target_` that has moved under its name of
    today: users wrote configs for earlier versions, and runs recorded them.
    """
    if isinstance(config, list):
        return [with_current_names(item) for item in config]
    if not isinstance(config, dict):
        return config
    current = {key: with_current_names(value) for key, value in config.items()}
    if isinstance(target := config.get("_target_"), str):
        current["_target_"] = current_name(target)
    return current


def public_names(module: str) -> list[str]:
    """Return the names that users import from a module of the core, and that extensions bring."""
    every = (name.rpartition(".") for extension in extensions() for name in extension.names)
    return [name for owner, _, name in every if owner == module]


def public(module: str, name: str) -> Any:
    """Return an object that users import from a module of the core, and that an extension brings.

    Raises:
        AttributeError: none brings it; says what to use for a name of another framework.
        ImportError: the same, of such a name in `from ... import`: there Python hides the sentence
            of an AttributeError.
    """
    target = current_name(f"{module}.{name}")
    if target != f"{module}.{name}":
        return resolve(target)
    if sentences := advice(module, name):
        asks = sys._getframe(2).f_code.co_name  # of the module's __getattr__
        kind = ImportError if asks == "_handle_fromlist" else AttributeError
        raise kind(f"{module} has no {name}{sentences}")
    raise AttributeError(f"module '{module}' has no attribute '{name}'")


def advice(place: str, name: str) -> str:
    """Return what to use for a name that another framework has there, as ". Use ..."; "" for others."""
    tables = [each.advice[place] for each in extensions() if place in each.advice]
    return next((f". {texts[name]}" for texts in map(resolve, tables) if name in texts), "")


def features(stage: Any) -> list[Any]:
    """Return the features that extensions have for a Stage."""
    targets = [target for each in extensions() for target in each.features]
    made = [make(stage) for make in map(resolve, targets)]
    return [feature for feature in made if feature is not None]


def remarks(run: Any) -> list[str]:
    """Return what extensions have to say about a fit that begins, a RunView."""
    targets = [target for each in extensions() for target in each.remarks]
    return [text for remark in map(resolve, targets) for text in remark(run)]


def conf_folders() -> list[Path]:
    """Return the folders of config groups that extensions bring."""
    specs = [
        importlib.util.find_spec(extension.conf) for extension in extensions() if extension.conf
    ]
    return [
        Path(place) / "conf"
        for spec in specs
        if spec is not None
        for place in spec.submodule_search_locations or ()
    ]


def broken_note() -> str:
    """Return a sentence about extensions that could not be read,
    for an error about an unknown name; else "".
    """
    notes = [
        f" The extension {each.name} (of {each.source}) could not be read: {clause(each.error)}."
        for each in broken()
    ]
    return "".join(notes)


@functools.cache
def _own() -> tuple[Extension, ...]:
    if importlib.util.find_spec(GROUP) is None:
        return ()  # a copy of trainkit without extensions trains all the same
    own = importlib.import_module(GROUP)
    return tuple(importlib.import_module(f"{GROUP}.{name}").EXTENSION for name in own.NAMES)


@functools.cache
def _installed() -> tuple[Extension | BrokenExtension, ...]:
    """Read the entry points of installed packages;
    importlib.metadata is not imported if no package has any.
    """
    if not _is_declared():
        return ()
    metadata = importlib.import_module("importlib.metadata")
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    return tuple(_read(point) for point in points)


def _is_declared() -> bool:
    """Return whether an installed package has such an entry point:
    a look at small files, without importlib.metadata.
    """
    for folder in filter(os.path.isdir, dict.fromkeys(sys.path)):
        for name in os.listdir(folder):
            file = Path(folder, name, "entry_points.txt")
            if (
                name.endswith((".dist-info", ".egg-info"))
                and file.is_file()
                and f"[{GROUP}]" in file.read_text(errors="replace")
            ):
                return True
    return False


def _read(point: Any) -> Extension | BrokenExtension:
    source = point.dist.name if point.dist is not None else "an unknown package"
    try:
        value = point.load()
    except Exception as error:  # of a stranger's module: anything
        return BrokenExtension(point.name, source, f"{type(error).__name__}: {error}")
    if not isinstance(value, Extension):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return BrokenExtension(
            point.name,
            source,
            f"{point.value} is a {kind}; it must be a trainkit.extension.Extension",
        )
    return replace(value, source=source)
