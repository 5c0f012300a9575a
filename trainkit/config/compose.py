"""From the command line to one checked, resolved config. With cli/run.py the only home of Hydra and OmegaConf.

command_line     the words typed -> a config's name, overrides, flags
hydra_node       composing; config files may not set what Hydra runs
schema           the constructors' check of the result
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
from trainkit.config.command_line import find_conf, force, split
from trainkit.config.explain import explain
from trainkit.config.hydra_node import check_hydra, compose
from trainkit.config.of_run import Primary, changes, primary_of
from trainkit.config.resources import conf_folders
from trainkit.errors import ConfigError
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
    conf, overrides, flags = split(arguments)
    folders = conf_folders(Path.cwd())
    Plugins.instance().register(OtherFolders)
    with tempfile.TemporaryDirectory() as folder:
        primary = primary_of(command, conf, overrides, folders, Path(folder))
        if primary is None:
            name = find_conf(conf, folders)
            primary = Primary(folders[0], name, name, overrides)
        try:
            _run(command, primary, flags, is_main, work)
        except (HydraException, OmegaConfBaseException) as error:
            explain(error)


def _run(command: str, primary: Primary, flags: list[str], is_main: bool, work: Callable[[Job], None]) -> None:
    folder, name = primary.folder, primary.name
    own = [*_QUIET, *([] if is_main else ["hydra/hydra_logging=none"])]
    overrides = [f"++conf={primary.conf}", *(force(override, conf_folders(Path.cwd())) for override in primary.overrides)]
    combinations = _combinations(overrides)
    if len(combinations) > 1 and not _is_multirun(flags):
        raise ConfigError(_SEVERAL.format(", ".join(o.removeprefix("++") for o in overrides if o not in combinations[0])))
    for combination in combinations:  # every job, before the first one runs
        composed = compose(folder, name, [*own, *combination])
        check_hydra(composed, folder, [*own, *(o for o in combination if o.lstrip("+~").startswith("hydra"))])
        job = _job(command, composed, overrides, primary) if not flags or _is_multirun(flags) else None
    if job is not None and not flags:
        work(job)
    elif is_main or _is_multirun(flags):
        with tempfile.TemporaryDirectory() as sweep:  # for Hydra's notes of a sweep; each run has its own
            own += [f"hydra.sweep.dir='{sweep}'", "hydra.sweep.subdir=."]
            _run_hydra(folder, name, flags, [*own, *overrides], lambda cfg: work(_job(command, cfg, overrides, primary)))


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
