"""Secrets of a config, masked wherever it leaves the process. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET = re.compile(
    r"(?:^|_)(?:tokens?|passwords?|passwd|passphrase|secrets?|api_?keys?|access_keys?|private_keys?|auth|credentials?|"
    r"webhook(?:_url)?)$"
)
# Tokens of a text, which are no secrets.
_OF_TEXT = re.compile(
    r"(?:^|_)(?:pad|bos|eos|sep|cls|mask|unk|special|image|start|end|stop|prompt|new|max|min|num)_tokens?$"
)
_SHORTEST = 6  # a shorter value stands in too many texts


def is_secret(key: str) -> bool:
    """Return whether a key, or the name of an environment variable, looks like that of a secret."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.rpartition(".")[2]).replace("-", "_").lower()
    return bool(_SECRET.search(name)) and not _OF_TEXT.search(name)


def masked(tree: Any, values: Collection[str] = ()) -> Any:
    """Return a tree of plain values with texts under secret keys masked, and `values` masked in
    every text.

    An interpolation (`${oc.env:TOKEN}`) is no secret, and stays.
    """
    if isinstance(tree, Mapping):
        return {
            key: MASK if is_secret(str(key)) and _is_text(v) else masked(v, values)
            for key, v in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return (
            type(tree)([masked(value, values) for value in tree])
            if type(tree) in (list, tuple)
            else tree
        )
    return scrubbed(tree, values) if isinstance(tree, str) else tree


def scrubbed(text: str, values: Collection[str]) -> str:
    """Return a text with each of these values masked; short ones stay."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK) if len(value) >= _SHORTEST else text
    return text


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line with `key=value` and
    `--key value` masked for secret keys.
    """
    shown: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and is_secret(key.lstrip("+-")) and _is_text(value):
            argument = f"{key}={MASK}"
        elif (
            shown
            and shown[-1].startswith("--")
            and "=" not in shown[-1]
            and is_secret(shown[-1].lstrip("-"))
        ):
            argument = MASK
        shown.append(argument)
    return shown


def masked_lines(text: str) -> str:
    """Return the text of a YAML file with the plain values of secret keys masked."""
    return "\n".join(_masked_line(line) for line in text.split("\n"))


def _masked_line(line: str) -> str:
    match = re.match(r"(\s*(?:- )?)([\w.-]+):\s+(.+)$", line)
    return (
        f"{match[1]}{match[2]}: '{MASK}'"
        if match and is_secret(match[2]) and _is_text(match[3])
        else line
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", "null", "???") and "${" not in value
