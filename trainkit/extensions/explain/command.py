"""explain: prints what an error means, with an example and the remedy; without a name, the list."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainkit.cli.as_json import print_json, split_json
from trainkit.cli.explained import explained
from trainkit.cli.usage import help_text, read_in_part
from trainkit.errors import did_you_mean
from trainkit.extensions.explain.usage import USAGE


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    with read_in_part():
        return _print(command, arguments)


def _print(command: str, arguments: Sequence[str]) -> int:
    if any(word in ("-h", "--help") for word in arguments):
        print(help_text(command, USAGE))
        return 0
    errors = explained()
    arguments, as_json = split_json(arguments)
    if as_json and (not arguments or arguments[0] in errors) and len(arguments) < 2:
        print_json({name: errors[name].text for name in arguments or errors})
        return 0
    if not arguments:
        print(
            "\n".join(f"  {name:<24}{first_sentence(error.text)}" for name, error in errors.items())
        )
        return 0
    name = arguments[0]
    if len(arguments) > 1 or name not in errors:
        typed = " ".join(arguments)
        known = ", ".join(errors)
        print(
            f"'{typed}' is not the name of an error.{did_you_mean(name, errors)} There are"
            f" {known}.",
            file=sys.stderr,
        )
        return 2
    print(f"{name}\n\n{errors[name].text}")
    return 0


def first_sentence(text: str) -> str:
    """Return the first sentence of a part, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."
