"""A script among the arguments of a command: `plan ranks=8 mine.py --width 64`.

The command's own options stand before the script. What stands after it is the script's, as with
`python mine.py --width 64`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import ConfigError, did_you_mean

_SUFFIX = ".py"


@dataclass(frozen=True)
class Script:
    """A script and its arguments, as typed."""

    path: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return Path(self.path).name


def split_script(arguments: Sequence[str]) -> tuple[list[str], Script | None]:
    """Return the arguments before a script, and the script with those after it; None if there is
    none.

    A script is the first argument that ends with ".py" and is not an option.
    """
    for place, word in enumerate(arguments):
        if word.endswith(_SUFFIX) and "=" not in word and not word.startswith("-"):
            return list(arguments[:place]), Script(word, tuple(arguments[place + 1 :]))
    return list(arguments), None


def check_script(
    command: str, script: Script, left: Sequence[str], own: Collection[str], needed: str = ""
) -> None:
    """Refuse a script that cannot be run, and arguments before it without a meaning.

    Args:
        left: arguments before the script that are not the command's own.
        own: names of the command's own options.
        needed: an option that is missing before the script.

    Raises:
        ConfigError: see above.
    """
    path = Path(script.path)
    if left:
        key = left[0].partition("=")[0]
        raise ConfigError(
            f"{left[0]} stands before {script.path}, and {command} has no option"
            f" '{key}'.{did_you_mean(key, own)} A script has no config: what it takes stands after"
            f" it, as {command} {script.path} {left[0]}. Before it stand {', '.join(own)}."
        )
    if path.is_dir():
        raise ConfigError(f"{script.path} is a folder; it must be a Python script.")
    if not path.is_file():
        there = sorted(each.name for each in (path.parent).glob("*.py")) if path.parent else []
        raise ConfigError(
            f"There is no script {script.path} in {Path.cwd()}.{did_you_mean(path.name, there)}"
        )
    if needed and (word := _of_key(needed, script.arguments)):
        raise ConfigError(
            f"{needed} is missing: {word} stands after {script.path}, and so it goes to the script."
            f" Write it before: {command} {word} {script.path}"
        )


def _of_key(key: str, arguments: Sequence[str]) -> str:
    return next((word for word in arguments if word.startswith(f"{key}=")), "")
