"""A config's numbers for one choice of a group.

`optimizer=adamw: {lr: 4e-3}` in a YAML file is `optimizer: {lr: 4e-3}`, at its place in the file,
if the composed config has that choice, and nothing if it has another. Without it, a recipe's rate
of AdamW would be that of any optimizer that the command line names. `trainer if optimizer=adamw:`
is `trainer:` likewise: a number of another key that belongs to the choice.

OtherFolders     makes Hydra search the user's folder, then the shipped one, through ChoiceSource
ChoiceSource     reads a file, and takes the sections of the choices in force
lines_of         a config's defaults list, with those of the configs that it names
likely_choices   those of a command line, as its configs' own lists have them
choices_of       the same with all that a defaults list may say: Hydra walks it once more
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainkit.config.explain import options_of
from trainkit.config.of_run import read_config
from trainkit.config.resources import conf_folders
from trainkit.config.yaml_file import check_yaml
from trainkit.errors import ConfigError, did_you_mean

_SCHEME = "trainkit"
_NO_GROUP = (
    "{0} has the key '{1}'; it must be GROUP=NAME, or KEY if GROUP=NAME. The groups are {2}.{3}"
)
_NO_CHOICE = "{0} has settings of '{1}', and {2} has no '{3}'.{4} There are {5}."
_NO_MAPPING = "{0}: '{1}' is {2!r}; it must be a mapping of {3}'s settings, as {{KEY: VALUE}}."
_NAMES = re.compile(r"[^\s,'\"\[\]]+")  # of a choice, or of several: [a, b]
_SECTION = re.compile(r"(?:(\w+) if )?(\w+)=([\w.-]+)")
_IN_FORCE: ContextVar[Mapping[str, Any] | None] = ContextVar("choices", default=None)


class OtherFolders(SearchPathPlugin):
    """Makes Hydra search the shipped conf/ after the user's own, for configs and for groups."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Read every folder through ChoiceSource; append those that Hydra does not search yet."""
        for element in search_path.get_path():
            folder = (element.path or "").removeprefix("file://")
            if folder and "://" not in folder:
                element.path = f"{_SCHEME}://{folder}"
        searched = [element.path for element in search_path.get_path()]
        for path in conf_folders(Path.cwd()):
            if f"{_SCHEME}://{path}" not in searched:
                search_path.append("trainkit", f"{_SCHEME}://{path}")


class ChoiceSource(ConfigSource):
    """A folder of YAML files, as Hydra's own source reads it, with the sections of choices."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._files = _source_of_files(provider, self.path)

    @staticmethod
    def scheme() -> str:
        """Return what a path of such a source begins with."""
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's config with the sections of the choices in force."""
        file = Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"
        content = file.read_bytes() if file.is_file() else None
        # a copy, since Hydra changes it: in a fifth of the time of copy.deepcopy
        result = pickle.loads(_loaded(self.provider, self.path, config_path, file, content))
        assert isinstance(result, ConfigResult)
        if isinstance(result.config, DictConfig):
            result.config = _with_sections(result.config, file)
        return result

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a folder."""
        return bool(self._files.is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a file."""
        return bool(self._files.is_config(config_path))

    def available(self) -> bool:
        """Return whether the folder exists."""
        return bool(self._files.available())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a folder."""
        return [*self._files.list(config_path, results_filter)]


def _source_of_files(provider: str, folder: str) -> Any:
    sources: list[Any] = [*Plugins.instance().discover(ConfigSource)]
    files = next(source for source in sources if source.scheme() == "file")
    return files(provider, f"file://{folder}")


@functools.lru_cache(maxsize=512)
def _loaded(provider: str, folder: str, name: str, file: Path, content: bytes | None) -> bytes:
    """Return a file as Hydra reads it, without sections, as bytes of pickle.

    Hydra reads each file once or twice to compose a job, and a sweep does so for each job: the same
    content is parsed once in a process.
    """
    if content is not None:
        check_yaml(file)
    return pickle.dumps(_source_of_files(provider, folder).load_config(name))


def register() -> None:
    """Make Hydra, in this process, read the folders of configs through ChoiceSource."""
    for plugin in (OtherFolders, ChoiceSource):
        Plugins.instance().register(plugin)


@contextlib.contextmanager
def in_force(choices: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, files are read with the sections of these choices, group -> name."""
    token = _IN_FORCE.set(choices)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def lines_of(
    name: str, folders: Sequence[Path], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, bool]]:
    """Yield group, name and whether it overrides, of each choice in the defaults list of a config
    and of those that it names, in their order.

    Raises:
        ConfigError: a file of them cannot be read, or includes itself.
    """
    if name in above:
        raise ConfigError(
            f"conf/{name}.yaml includes itself: {' -> '.join([*above, name])}. Take it out of a"
            " defaults list."
        )
    file = next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)
    defaults = None if file is None else _defaults_in(file, file.stat().st_mtime_ns)
    for line in defaults if isinstance(defaults, list) else []:
        if isinstance(line, dict):
            for key, choice in line.items():
                yield str(key).split()[-1], choice, "override" in str(key).split()
        elif isinstance(line, str) and line not in ("_self_", name):
            yield from lines_of(line, folders, (*above, name))


@functools.lru_cache(maxsize=512)
def _defaults_in(file: Path, changed_ns: int) -> Any:
    return read_config(file).get("defaults")


def choices_of(name: str | None, overrides: list[str]) -> dict[str, Any]:
    """Return group -> name of a config that Hydra, which is initialized, would compose."""
    loader = GlobalHydra.instance().config_loader()
    defaults = loader.compute_defaults_list(name, overrides, RunMode.RUN)
    return dict(defaults.overrides.known_choices)


def likely_choices(
    name: str, overrides: Sequence[str], folders: Sequence[Path]
) -> dict[str, str | None]:
    """Return group -> name by the lists of a config, of an experiment, and by the command line.

    That is all, as a rule, and a hundredth of the work of `choices_of`. It leaves out what a file of
    another group chooses, and an interpolation.
    """
    chosen: dict[str, str | None] = {}
    typed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    for config in (name, f"experiment/{typed.get('experiment')}"):
        for group, choice, is_override in lines_of(config, folders):
            if is_override or group not in chosen:
                chosen[group.removeprefix("/")] = choice
    left_out = [override[1:].partition("=")[0] for override in overrides if override[0] == "~"]
    return {group: name for group, name in (chosen | typed).items() if group not in left_out}


def _with_sections(config: DictConfig, file: Path) -> DictConfig:
    """Return the config of a file with each section at its place, merged or left out."""
    if not any(isinstance(key, str) and "=" in key for key in config):
        return config
    merged: list[dict[str, Any]] = [{}]
    choices = _IN_FORCE.get() or {}
    for key, value in plain_of(config).items():
        if "=" not in key:
            merged[-1][key] = value
            continue
        node, group, choice = _parts(key, value, file)
        if choice in _NAMES.findall(str(choices.get(group))):  # a list, too: [adamw]
            merged += [{node: value or {}}, {}]
    composed = OmegaConf.merge(*merged)
    assert isinstance(composed, DictConfig)
    return composed


def plain_of(config: DictConfig) -> dict[str, Any]:
    """Return a config as a mapping, its interpolations not resolved."""
    held = OmegaConf.to_container(config, resolve=False)
    assert isinstance(held, dict)
    return {str(key): value for key, value in held.items()}


def _parts(key: str, value: Any, file: Path) -> tuple[str, str, str]:
    """Return what a section sets, and the group and choice for which it holds.

    Raises:
        ConfigError: there is no such choice, or the section does not hold settings.
    """
    matched = _SECTION.fullmatch(key)
    folders = conf_folders(Path.cwd())
    names = options_of(matched[2], folders) if matched is not None else []
    if matched is None or not names:
        files = [path for folder in folders for path in folder.glob("*/*.yaml")]
        groups = sorted({path.parent.name for path in files})
        near = did_you_mean("".join(key.partition("=")[0].split()[-1:]), groups)
        raise ConfigError(_NO_GROUP.format(file, key, ", ".join(groups), near))
    node = matched[1] or matched[2]
    group = matched[2]
    choice = matched[3]
    if choice not in names:
        near = did_you_mean(choice, names)
        raise ConfigError(_NO_CHOICE.format(file, key, group, choice, near, ", ".join(names)))
    if value is not None and not isinstance(value, dict):
        raise ConfigError(_NO_MAPPING.format(file, key, value, node))
    return node, group, choice
