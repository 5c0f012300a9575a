"""completion: tab completion for bash: commands, configs, groups and their options, settings,
folders of runs.

The shell calls this module with the line up to the cursor; it answers from file names and source
texts, without torch.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainkit.cli.commands import all_commands, find_usage, parts_of
from trainkit.cli.usage import help_text
from trainkit.config import documentation
from trainkit.config.resources import conf_folders
from trainkit.extension import Usage
from trainkit.extensions.completion.usage import USAGE

_SCRIPT = """\
_trainkit() {
  local IFS=$'\\n'
  case "$COMP_LINE" in
    trainkit\\ * | */trainkit\\ * | *" -m trainkit "*) ;;
    *) return ;;
  esac
  COMPREPLY=($(PYTHON -m trainkit completion --line "${COMP_LINE:0:COMP_POINT}" 2> /dev/null))
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/.] ]] && compopt -o nospace 2> /dev/null
}
complete -o default -F _trainkit trainkit python python3 horovodrun torchrun
"""
_BREAK = re.compile(r".*[=:]")  # bash replaces what follows the last of its word breaks


def main(command: str, arguments: Sequence[str]) -> int:
    """Print the script for a shell, or the answers for a line; return the exit code."""
    if len(arguments) == 2 and arguments[0] == "--line":
        print("\n".join(answers(arguments[1], Path.cwd())))
        return 0
    if "-h" in arguments or "--help" in arguments:
        print(help_text(command, USAGE))
        return 0
    if list(arguments) != ["bash"]:
        shell = " ".join(arguments) or "missing"
        print(
            f"Error: the shell is {shell}; it must be bash.\n\n{help_text(command, USAGE)}",
            file=sys.stderr,
        )
        return 2
    print(_SCRIPT.replace("PYTHON", shlex.quote(sys.executable)), end="")
    return 0


def answers(line: str, folder: Path) -> list[str]:
    """Return what may stand at the end of a line in place of its last word,
    or of the part after its last "=".
    """
    *before, word = _words(line)
    candidates = sorted(
        {text for text in _candidates(before, word, folder) if text.startswith(word)}
    )
    start = _BREAK.match(word)
    return [text[start.end() if start else 0 :] for text in candidates]


def _words(line: str) -> list[str]:
    """Return the words after "trainkit"; the last one is that at the cursor, maybe empty."""
    rest = re.split(r"(?:^|[\s/])trainkit\s", line, maxsplit=1)[-1]
    return [text.strip("'\"") for text in re.split(r"\s+", rest.lstrip())]


def _candidates(before: Sequence[str], word: str, folder: Path) -> Iterable[str]:
    if not before:
        return all_commands()
    command = before[0]
    if command == "horovod":
        return ["install", "wheel", "check"] if len(before) == 1 else []
    if command == "completion":
        return ["bash"]
    usage = find_usage(command)
    if len(before) == 1 and (parts := [*(usage.parts if usage else ()), *parts_of(command)]):
        return parts
    usage = find_usage(" ".join(before[:2])) or usage  # of a part, as `data pack`
    if usage is None:
        return []
    key, equals, _ = word.partition("=")
    if equals and not Path(word.rpartition("/")[0] or "-").is_dir():
        return [f"{key}={value}" for value in _values(usage, key, word, folder)]
    keys = [name if name.startswith("-") else f"{name}=" for name, *_ in usage.options]
    if usage.takes_config:
        keys += ["conf=", *(f"{group}=" for group in _groups(folder)), *_settings(word, folder)]
    return [*keys, *(_folders(word, folder) if usage.takes_run else []), "--help"]


def _values(usage: Usage, key: str, word: str, folder: Path) -> Iterable[str]:
    value = word.partition("=")[2]
    kinds = {name: kind for name, kind, *_ in usage.options}
    if key == "conf":
        return [
            path.stem
            for place in conf_folders(folder)
            for path in place.glob("*.yaml")
            if path.stem[0] != "_"
        ]
    if key in kinds:
        kind = kinds[key]
        names = [
            text for text in kind.split(" | ") if text.islower() and text not in ("int", "float")
        ]
        places = _folders(value, folder) if "FOLDER" in kind or "FILE" in kind else []
        return [*(["true", "false"] if kind == "bool" else names), *places]
    if key in _groups(folder):
        several = (
            value.rpartition(",")[0] + "," if "," in value else "[" if value.startswith("[") else ""
        )
        return [
            several + path.stem
            for place in conf_folders(folder)
            for path in (place / key).glob("*.yaml")
        ]
    if key.startswith("trainer."):
        argument = next(
            (
                a
                for a in documentation.arguments_of("trainkit.trainer.Trainer")
                if f"trainer.{a.name}" == key
            ),
            None,
        )
        kind = "" if argument is None else argument.kind
        return [
            *re.findall(r"'([^']*)'", kind),
            *(["true", "false"] if re.search(r"\bbool\b", kind) else []),
        ]
    return []


def _groups(folder: Path) -> list[str]:
    return sorted(
        {path.name for place in conf_folders(folder) for path in place.iterdir() if path.is_dir()}
    )


def _settings(word: str, folder: Path) -> list[str]:
    """Return the settings below the group that a word names;
    before it names one, "trainer." alone.
    """
    group, point, _ = word.partition(".")
    if not point:
        return ["trainer."]
    if group == "trainer":
        return [
            f"trainer.{argument.name}="
            for argument in documentation.arguments_of("trainkit.trainer.Trainer")
        ]
    texts = [
        path.read_text()
        for place in conf_folders(folder)
        for path in (place / group).glob("*.yaml")
    ]
    return [
        f"{group}.{key}="
        for text in texts
        for key in re.findall(r"^([a-z]\w*):", text, re.MULTILINE)
        if key != "defaults"
    ]


def _folders(word: str, folder: Path) -> list[str]:
    """Return the folders that a path may continue with; of none, those that hold runs."""
    if not word:
        return [f"{name}/" for name in ("runs",) if (folder / name).is_dir()]
    folders = (folder / word.rpartition("/")[0]).glob(f"{word.rpartition('/')[2]}*/")
    parent = f"{word.rpartition('/')[0]}/" if "/" in word else ""
    return [
        f"{parent}{path.name}{'' if (path / 'config.yaml').is_file() else '/'}"
        for path in folders
        if path.is_dir()
    ]
