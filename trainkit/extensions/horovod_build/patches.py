"""trainkit's edits to Horovod's source: horovod-0.28.1/*.patch, each with its purpose in its first
lines.

    identity, version      id of this set of edits; the version of an edited Horovod begins with 0.28.1+trainkit.e1b2c3d4f
    installed_edits        the edits of this environment's Horovod, from its metadata; nothing is imported
    edited_source          unpacks the release and applies all edits, or fails
    `- apply              one patch: a unified diff with old lines exactly at their place

The release is fixed by its SHA-256, so a differing line is a mistake of ours; there is no fuzzy
matching.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.errors import EngineError
from trainkit.extensions.horovod_build.pip import VERSION

_FOLDER = Path(__file__).with_name(f"horovod-{VERSION}")
_FILE = re.compile(r"^--- (?:a/(?P<old>\S+)|/dev/null)\n\+\+\+ b/(?P<new>\S+)\n", re.MULTILINE)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@functools.cache
def edits() -> dict[str, str]:
    """Return the text of each edit by file name, in the order in which they are applied.

    The files are read once: the build contains the edits named by its version, even if a file
    changes meanwhile.
    """
    texts = {patch.name: patch.read_bytes().decode() for patch in sorted(_FOLDER.glob("*.patch"))}
    if not texts:
        raise EngineError(
            f"{_FOLDER} has no .patch files: this installation of trainkit is incomplete. Install"
            " it again."
        )
    return texts


def identity() -> str:
    """Return an id of the content of all edits: any change in one of them changes it."""
    content = hashlib.sha256("".join(f"{name}\n{text}" for name, text in edits().items()).encode())
    # a letter first: pip would take zeros off the front of a number
    return f"e{content.hexdigest()[:8]}"


def version() -> str:
    """Return the first part of the version of a Horovod with these edits;
    `versions.py` has the rest.
    """
    return f"{VERSION}+trainkit.{identity()}"


def edits_of(version: str) -> str | None:
    """Return the id of the edits in a version of Horovod, to be compared with identity();
    None if it has none.
    """
    _, _, local = version.partition("+trainkit.")
    return local.partition(".")[0] or None


def installed_edits() -> str | None:
    """Return the id of the installed Horovod's edits, to be compared with identity();
    None for a stock one or no Horovod.
    """
    try:
        return edits_of(importlib.metadata.version("horovod"))
    except importlib.metadata.PackageNotFoundError:
        return None


def edited_source(archive: Path, folder: Path, version: str) -> Path:
    """Unpack the verified release into a folder, apply all edits, give it a version, and return the
    tree's root.

    Raises:
        EngineError: the archive is not a release, or an edit does not apply; the message has edit,
            file and line.
    """
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(
                folder,
                **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}),  # type: ignore[arg-type]
            )
    except (tarfile.TarError, OSError) as error:
        raise EngineError(f"{archive} cannot be unpacked into {folder}: {error}") from None
    root = folder / f"horovod-{VERSION}"
    for name, text in edits().items():
        apply(name, text, root)
    face = root / "horovod" / "__init__.py"
    text = _read(face, patch="the edit of the version")
    stock = f"__version__ = '{VERSION}'"
    if text.count(stock) != 1:
        raise EngineError(f"The edit of the version does not apply: {face} has no line {stock}.")
    face.write_text(text.replace(stock, f"__version__ = '{version}'"), encoding="utf-8")
    return root


def apply(patch: str, text: str, root: Path) -> None:
    """Apply the text of a patch, named `patch`, to a tree; either all files are written or none.

    Raises:
        EngineError: a line of the patch is not at its place; the message has patch, file and line.
    """
    heads = list(_FILE.finditer(text))
    about = text[: heads[0].start()] if heads else text
    if not heads or re.search(r"^(@@|---|\+\+\+) ", about, re.MULTILINE):
        raise EngineError(
            f"The edit {patch} is damaged: no file is named, or not as `--- a/FILE` and `+++"
            " b/FILE`."
        )
    ends = [head.start() for head in heads[1:]] + [len(text)]
    edited = [
        _edited(patch, head, text[head.end() : end], root)
        for head, end in zip(heads, ends, strict=True)
    ]
    for file, content in edited:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def _edited(patch: str, head: re.Match[str], body: str, root: Path) -> tuple[Path, str]:
    """Return a file of a patch, and its new content."""
    file = root / head["new"]
    if head["old"] is None and file.exists():
        raise EngineError(
            f"The edit {patch} does not apply: it creates {file}, which exists already."
        )
    old = (
        []
        if head["old"] is None
        else _read(file, patch=f"The edit {patch}").splitlines(keepends=True)
    )
    new: list[str] = []
    done = 0
    for start, lines in _hunks(patch, head["new"], body):
        new += old[done:start]
        done = start
        for line in lines:
            if line[0] in " -":
                if done >= len(old) or old[done] != line[1:]:
                    here = repr(old[done]) if done < len(old) else "the end of the file"
                    raise EngineError(
                        f"The edit {patch} does not apply: line {done + 1} of {file} is {here}, and"
                        f" it should be {line[1:]!r}. Edits and release do not match; install"
                        " trainkit again."
                    )
                done += 1
            if line[0] in " +":
                new.append(line[1:])
    return file, "".join(new + old[done:])


def _hunks(patch: str, name: str, body: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line of each hunk of a file's diff, counted from 0, and its lines."""
    number = 0
    lines = body.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        match = _HUNK.match(lines[at])
        at += 1
        if match is None and not lines[at - 1].strip():
            continue  # the empty line between two files
        number += 1
        if match is None:
            raise EngineError(
                f"The edit {patch} is damaged: hunk {number - 1} of {name} in it ends before"
                f" {lines[at - 1]!r}."
            )
        old, new = (
            (int(match[2] or 1), int(match[4] or 1)) if match[1] != "0" else (0, int(match[4] or 1))
        )
        start = max(int(match[1]) - 1, 0)
        first = at
        while at < len(lines) and (old > 0 or new > 0):
            old -= lines[at][0] in " -"
            new -= lines[at][0] in " +"
            at += 1
        if old or new:
            raise EngineError(
                f"The edit {patch} is damaged: hunk {number} of {name} in it ends before its last"
                " line."
            )
        yield start, lines[first:at]


def _read(file: Path, patch: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{patch} does not apply: {file} cannot be read: {error}") from None
