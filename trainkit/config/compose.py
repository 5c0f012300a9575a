"""From the command line to one checked, resolved config. With cli/run.py the only home of Hydra and OmegaConf.

`conf=NAME` selects conf/NAME.yaml, of the user's folder before the shipped one; the rest is Hydra's grammar. Every value
override may add a key (`a.b=1` means `++a.b=1`): the constructors decide which keys exist (schema.py), since they know more
than the yaml files and name the nearest key.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config import schema
from trainkit.config.explain import explain, options_of
from trainkit.config.of_run import Primary, changes, primary_of
from trainkit.config.resources import conf_folders
from trainkit.errors import ConfigError, did_you_mean
from trainkit.run.folder import job_started

# Hydra writes nothing: rank 0 writes the run's files, after all checks (cli/run.py).
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra/job_logging=none",
)
_STARTED = time.localtime()
_SEVERAL = "{} has several values. For one run of each add -m; for a list write key=[a,b]; for a string with a comma key='a,b'."


@dataclass(frozen=True)
class Job:
    """One job of a command.

    Attributes:
        command: "fit", "validate", "test" or "predict".
        config: resolved and checked.
        files: files for the run's folder: file name -> text.
        notes: differences from the config of the run in `run_dir`, if that is evaluated.
    """

    command: str
    config: dict[str, Any]
    files: dict[str, str]
    notes: tuple[str, ...] = ()


_FLAGS = ("cfg", "package", "shell-completion", "config-path", "config-name", "config-dir", "experimental-rerun", "info")
_NO_NUMBER = "{0} is {1}, and {0} names a config: {2}. A single value is set as {3}"
_MEANT = {"lr": "lr.NAME=...; the rate itself is the optimizer's: optimizer.lr=..."}  # if another key may be meant


class OtherFolders(SearchPathPlugin):
    """Makes Hydra search the shipped conf/ after the user's own, for configs and for groups."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append every folder that is not searched yet: Hydra's primary one is."""
        searched = [element.path for element in search_path.get_path()]
        for folder in conf_folders(Path.cwd()):
            if f"file://{folder}" not in searched:
                search_path.append("trainkit", f"file://{folder}")


def run(command: str, arguments: Sequence[str], is_main: bool, work: Callable[[Job], None]) -> None:
    """Compose, check, and pass each job to `work`: one, or one for each combination with -m.

    Raises:
        ConfigError: a mistake in the command line or in a config.
    """
    conf, overrides, flags = _split(arguments)
    folders = conf_folders(Path.cwd())
    Plugins.instance().register(OtherFolders)
    with tempfile.TemporaryDirectory() as folder:
        primary = primary_of(command, conf, overrides, folders, Path(folder))
        if primary is None:
            name = _find_conf(conf, folders)
            primary = Primary(folders[0], name, name, overrides)
        try:
            _run(command, primary, flags, is_main, work)
        except (HydraException, OmegaConfBaseException) as error:
            explain(error)


def _run(command: str, primary: Primary, flags: list[str], is_main: bool, work: Callable[[Job], None]) -> None:
    folder, name = primary.folder, primary.name
    own = [*_QUIET, *([] if is_main else ["hydra/hydra_logging=none"])]
    overrides = [f"++conf={primary.conf}", *(_force(override, conf_folders(Path.cwd())) for override in primary.overrides)]
    combinations = _combinations(overrides)
    if len(combinations) > 1 and not _is_multirun(flags):
        raise ConfigError(_SEVERAL.format(", ".join(o.removeprefix("++") for o in overrides if o not in combinations[0])))
    for combination in combinations:  # every job, before the first one runs
        composed = _compose(folder, name, [*own, *combination])
        _check_hydra(composed, folder, [*own, *(o for o in combination if o.lstrip("+~").startswith("hydra"))])
        job = _job(command, composed, overrides, primary) if not flags or _is_multirun(flags) else None
    if job is not None and not flags:
        work(job)
    elif is_main or _is_multirun(flags):
        with tempfile.TemporaryDirectory() as sweep:  # for Hydra's notes of a sweep; each run has its own
            own += [f"hydra.sweep.dir='{sweep}'", "hydra.sweep.subdir=."]
            _run_hydra(folder, name, flags, [*own, *overrides], lambda cfg: work(_job(command, cfg, overrides, primary)))


def list_confs(folders: Sequence[Path]) -> list[str]:
    """Return the legal names of `conf=`."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml") if not path.stem.startswith("_")})


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    conf, overrides, flags = None, [], []
    for argument in arguments:
        if argument.startswith("conf="):
            conf = argument.removeprefix("conf=")
        elif argument.startswith("-"):
            name, sign, _ = argument.lstrip("-").partition("=")
            if sign and name not in _FLAGS:
                raise ConfigError(f"'{argument}' is no flag. A setting is key=value, without dashes, as trainer.max_epochs=3.")
            flags.append(argument)
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        elif flags:
            flags.append(argument)  # a flag's value, as in `--cfg job`
        elif argument in list_confs(conf_folders(Path.cwd())):
            raise ConfigError(f"'{argument}' is a config; select it with conf={argument}.")
        else:
            raise ConfigError(f"'{argument}' is no override; it must look like key=value, as trainer.max_epochs=3.")
    return conf, overrides, flags


def _find_conf(conf: str | None, folders: Sequence[Path]) -> str:
    names = list_confs(folders)
    if conf is None:
        raise ConfigError(f"conf is missing. Give conf=NAME; there are {', '.join(names)}. Or name a run: run_dir=RUN.")
    name = conf.removesuffix(".yaml")
    if not any((folder / f"{name}.yaml").is_file() for folder in folders):
        raise ConfigError(
            f"conf is '{conf}', and there is no such config.{did_you_mean(name, names)} There are {', '.join(names)}."
        )
    return name


def _force(override: str, folders: Sequence[Path]) -> str:
    """Turn `a.b=1` into `++a.b=1`; leave groups (`data=digits`) and explicit forms (`+`, `~`) alone."""
    key = override.split("=", 1)[0]
    is_group = "/" in key or "@" in key or any((folder / key).is_dir() for folder in folders)
    _, sign, value = override.partition("=")
    if is_group and sign and override[0] not in "+~" and any(map(_is_number, value.split(","))):
        raise ConfigError(
            _NO_NUMBER.format(key, value, ", ".join(options_of(key, folders)), _MEANT.get(key, f"{key}.NAME=..."))
        )
    return override if override[0] in "+~" or is_group or key.startswith("hydra") else f"++{override}"


def _is_number(value: str) -> bool:
    """Whether Hydra would read a value as something other than the name of a config."""
    try:
        float(value)
    except ValueError:
        return value.lower() in ("true", "false")
    return True


def _combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job: every choice of every sweep with every other, as Hydra's basic sweeper does."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_discrete_sweep()
        else [text]
        for text, override in zip(overrides, parsed, strict=True)
    ]
    return [list(combination) for combination in itertools.product(*choices)]


def _compose(folder: Path, name: str | None, overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    hydra.initialize_config_dir(str(folder), version_base="1.3")
    config = hydra.compose(name, overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return config


def _is_multirun(flags: Sequence[str]) -> bool:
    return "-m" in flags or "--multirun" in flags


def _run_hydra(folder: Path, name: str, flags: list[str], overrides: list[str], task: Callable[[DictConfig], None]) -> None:
    """Run Hydra's own main for its flags (--cfg, --info, -m)."""
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors unchanged; _explain rewords them
    before = sys.argv
    sys.argv = [before[0], f"--config-name={name}", *flags, *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(folder))(task)()
    finally:
        sys.argv = before


def _job(command: str, config: DictConfig, overrides: Sequence[str], primary: Primary) -> Job:
    # One time for all jobs of a sweep; Hydra would read the clock for each.
    OmegaConf.register_new_resolver("now", lambda pattern: time.strftime(pattern, _STARTED), replace=True)
    OmegaConf.clear_cache(config)
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    text = OmegaConf.to_yaml(own)
    resolved = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    plain = {str(key): value for key, value in resolved.items()}
    plain.setdefault("seed", 0)
    plain.setdefault("run_dir", f"runs/{plain['conf']}/{job_started() or time.strftime('%Y-%m-%d_%H-%M-%S', _STARTED)}")
    _refuse_trust_in_files(plain.get("trust") or [], overrides)
    hydra_config = HydraConfig.get()
    if hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN":
        plain["run_dir"] = f"{plain['run_dir']}/{hydra_config.job.num}"
    _refuse_a_new_folder(plain, own)
    unused = [key for key in ("optimizer", "lr") if plain.get(key) and f"${{{key}" not in text]
    schema.check(plain, command, unused)
    shown = [override.removeprefix("++") for override in overrides]
    files = {"config.yaml": OmegaConf.to_yaml(OmegaConf.create(plain))}
    files |= {".hydra/config.yaml": text, ".hydra/overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(shown))}
    return Job(command, plain, files, changes(primary.saved, plain))


def _refuse_a_new_folder(plain: dict[str, Any], config: DictConfig) -> None:
    """Refuse `resume=auto` in a folder named after the time: it would never find anything."""
    given = OmegaConf.to_container(config, resolve=False)
    run_dir = str(given.get("run_dir", "${now:}")) if isinstance(given, dict) else ""
    if plain.get("resume") is not None and "${now:" in run_dir:
        raise ConfigError(
            "resume is 'auto', but each start has a new folder (run_dir holds the time): there would never be anything to "
            f"resume from. Give the run's folder: run_dir=runs/{plain['conf']}/mine"
        )


def _refuse_trust_in_files(trust: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse `trust` in a config file: it extends the allow-list, so only the command line may set it."""
    if trust and not any(override.lstrip("+").startswith("trust=") for override in overrides):
        raise ConfigError(f"trust is {list(trust)} in a config file; it may only be given on the command line: trust=[...].")


def _check_hydra(config: DictConfig, folder: Path, typed: list[str]) -> None:
    """Refuse a config file that changes the objects that Hydra itself builds and runs.

    Hydra builds its launcher, sweeper, callbacks and logging from the config, of any class, before any check. They must be
    those of an empty config, except for overrides on the command line.
    """
    plain = _hydra_parts(_compose(folder, None, typed))
    found = _hydra_parts(config)
    HydraConfig.instance().set_config(config)
    for key, value in found.items():
        if value != plain[key]:
            raise ConfigError(f"A config file sets hydra.{key}, which decides what Hydra runs. Give it at the command line.")


def _hydra_parts(config: DictConfig) -> dict[str, Any]:
    """Return the parts of Hydra's own config that can run code or change the process, resolved."""
    HydraConfig.instance().set_config(config)
    node = config.hydra
    parts = {key: node[key] for key in ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")}
    parts |= {f"job.{key}": node.job[key] for key in ("env_set", "env_copy", "chdir")}
    return {
        key: OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part for key, part in parts.items()
    }
