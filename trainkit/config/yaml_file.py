"""A YAML file before OmegaConf reads it: how much its aliases stand for, values with a tag, its
defaults list.

OmegaConf copies what an alias (`*name`) stands for: nine lines of nine aliases each are 400 million
values.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import yaml  # type: ignore[import-untyped]
from yaml.error import MarkedYAMLError  # type: ignore[import-untyped]

from trainkit.errors import ConfigError

_MOST_VALUES = 100_000
_MOST_LEVELS = 100  # a parser in C would crash at 100,000
_TAG = "tag:yaml.org,2002:"
_LEGAL = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "timestamp": "a date, as 2026-01-31",
    "binary": "text in base64",
}
_DEFAULTS = (
    "a list of which each line is a config, as `- mlp`, or a choice of one group, as `- optimizer:"
    " sgd`"
)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # ten times as fast where it is built
    """Reads a date without a tag as text, as OmegaConf does."""

    yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if tag != f"{_TAG}timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def check_yaml(path: Path) -> None:
    """Refuse what OmegaConf and Hydra would answer with an error of their code, or with minutes of
    copying.

    Raises:
        ConfigError: by its file, line and key; also if it cannot be parsed.
    """
    try:
        text = path.read_bytes().decode()
        _refuse_depth(path, text)
        loader = _Loader(text)
        node = loader.get_single_node()
        reader = _NodeWalk(path, loader)
        size = 0 if node is None else reader.size_of(node, "")
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{unreadable(path, error)} Correct the file, or name another config."
        ) from error
    if size > _MOST_VALUES and reader.has_aliases:
        raise ConfigError(
            f"{path} stands for more than {_MOST_VALUES} values once its aliases (*name) are"
            " copied. Write what is meant without them, or use interpolations: ${name}."
        )
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not _is_text(key):
            raise ConfigError(
                f"{_place(path, key)}: the key {_shown(text, key)} is no name of a setting."
            )
        if key.value == "defaults" and not _are_defaults(value):
            raise ConfigError(
                f"{_place(path, value)}: defaults is {_shown(text, value)}; it must be {_DEFAULTS}."
            )


def unreadable(path: Path, error: Exception) -> str:
    """Return a sentence with file, line and column of the fault in a YAML file."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = " ".join(text for text in (error.context, error.problem) if text)
        return f"{path}, line {mark.line + 1}, column {mark.column + 1}: {what}."
    if isinstance(error, UnicodeDecodeError):
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        return (
            f"{path}, line {line}, column {column}: byte 0x{error.object[error.start]:02x} is not"
            " UTF-8. Save it as UTF-8."
        )
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{path} cannot be read: {first.rstrip('.')}."


def _refuse_depth(path: Path, text: str) -> None:
    levels = 0
    for event in yaml.parse(text, Loader=_Loader):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if levels > _MOST_LEVELS:
            raise ConfigError(
                f"{_place(path, event)}: values are nested more than {_MOST_LEVELS} levels deep."
            )


class _NodeWalk:
    """Walks over the nodes of a file, each once."""

    def __init__(self, path: Path, loader: _Loader) -> None:
        self.has_aliases = False
        self._path = path
        self._loader = loader
        self._sizes: dict[int, int | None] = {}  # None within the node itself

    def size_of(self, node: yaml.Node, key: str) -> int:
        """Return how many values a node stands for; an illegal one is refused by its key."""
        if id(node) in self._sizes:
            self.has_aliases = True
            size = self._sizes[id(node)]
            if size is None:
                raise ConfigError(
                    f"{_place(self._path, node)}: {key} stands for itself (an alias within its own"
                    " anchor)."
                )
            return size
        self._sizes[id(node)] = None
        size = 1
        if isinstance(node, yaml.MappingNode):
            size += sum(
                self.size_of(value, f"{key}.{name.value}".lstrip(".")) for name, value in node.value
            )
            size += sum(self.size_of(name, key) for name, _ in node.value)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(
                self.size_of(item, f"{key}.{i}".lstrip(".")) for i, item in enumerate(node.value)
            )
        else:
            self._check_scalar(node, key)
        self._sizes[id(node)] = size
        return size

    def _check_scalar(self, node: yaml.ScalarNode, key: str) -> None:
        kind = node.tag.removeprefix(_TAG)
        if kind not in _LEGAL:
            return
        try:
            self._loader.construct_object(node)
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            # PyYAML converts without checks
            what = (
                f"{_place(self._path, node)}: {key or 'the file'} is '{node.value}' with the tag"
                f" !!{kind}"
            )
            raise ConfigError(f"{what}; it must be {_LEGAL[kind]}.") from None


def _are_defaults(node: yaml.Node) -> bool:
    return isinstance(node, yaml.SequenceNode) and all(_is_default(item) for item in node.value)


def _is_default(node: yaml.Node) -> bool:
    if not isinstance(node, yaml.MappingNode):
        return _is_text(node)
    if len(node.value) != 1:
        return False
    group, choice = node.value[0]
    names = choice.value if isinstance(choice, yaml.SequenceNode) else [choice]
    is_none = choice.tag == f"{_TAG}null"  # takes back what another list chose
    return _is_text(group) and (is_none or all(_is_text(name) for name in names))


def _is_text(node: yaml.Node) -> bool:
    return (
        isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}str" and bool(node.value.strip())
    )


def _place(path: Path, node: yaml.Node | yaml.Event) -> str:
    return f"{path}, line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def _shown(text: str, node: yaml.Node) -> str:
    """Return a node as its file has it, on one line."""
    shown = " ".join(text[node.start_mark.index : node.end_mark.index].split())
    return shown if len(shown) < 100 else f"{shown[:100]} ..."


def explain_file(error: MarkedYAMLError | RecursionError, name: str) -> NoReturn:
    """Raise the error of a file that Hydra has read itself: the file, the line and the column."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        raise ConfigError(
            unreadable(Path(str(error.problem_mark.name).strip("'\" ")), error)
        ) from None
    if isinstance(error, RecursionError) and not any(
        "omegaconf" in line or "hydra" in line for line in _frames(error)
    ):
        raise error
    raise ConfigError(
        f"{name}.yaml, or a config in its defaults list, includes itself. Take it out of that list."
    ) from None


def _frames(error: BaseException) -> list[str]:
    files = []
    trace = error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return files[-50:]
