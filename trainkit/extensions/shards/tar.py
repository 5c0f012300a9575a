"""Which bytes of a tar are which file of which sample, found from its headers without reading the
files.

A sample is a run of files with one key: the name up to the first dot after the last slash, as in
WebDataset.

    n01440764/n01440764_10026.jpeg      sample "n01440764/n01440764_10026", its file "jpeg"
    n01440764/n01440764_10026.cls       the same sample, its file "cls"
    __meta__/info.json                  of no sample: two underscores around a first name, as there
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from trainkit.errors import DataError

_BLOCK = 512
_NAMED = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_ABOUT_THE_TAR = re.compile(r"__[^/]*__($|/)")  # as webdataset's own
_PLAIN = (b"0", b"\0")


class File(NamedTuple):
    """A file of a tar: its name, and where its bytes are."""

    name: str
    offset: int
    size: int


class Members:
    """The samples of one tar, in its order. A few bytes for each file: names are read again when
    they are asked for.

    Args:
        file: the tar, open; its path may be gone (it was evicted from the cache).
        name: its name in messages.

    Raises:
        DataError: it cannot be read as a tar, ends too early, or has a file of a sample twice.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        offsets, sizes, kinds, starts = list[int](), list[int](), list[int](), list[int]()
        known: dict[str, int] = {}
        of_sample = set[str]()
        before = None
        for key, extension, member in _of_samples(file, name):
            if key != before:
                starts.append(len(offsets))
                before = key
                of_sample.clear()
            if extension in of_sample:
                raise DataError(
                    f"{name} has two files '{extension}' in a row of the sample '{key}'; a sample"
                    " has one of each extension, in any case of letters. It was written twice, or"
                    " two samples have one name: write the shard again with a name for each."
                )
            of_sample.add(extension)
            offsets.append(member.offset)
            sizes.append(member.size)
            kinds.append(known.setdefault(extension, len(known)))
        self._extensions = list(known)
        self._starts: npt.NDArray[np.int64] = np.array([*starts, len(offsets)], np.int64)
        self._places: npt.NDArray[np.int64] = (
            np.array([offsets, sizes, kinds], np.int64).reshape(3, -1).T
        )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, place: int) -> dict[str, tuple[int, int]]:
        """Return the files of a sample: extension -> offset and size."""
        rows = self._places[self._starts[place] : self._starts[place + 1]].tolist()
        return {self._extensions[kind]: (offset, size) for offset, size, kind in rows}

    def key_of(self, place: int) -> str:
        """Return a sample's key."""
        first = int(self._places[self._starts[place], 0])
        return next(
            (
                key
                for key, _, member in _of_samples(self._file, self._name)
                if member.offset == first
            ),
            "",
        )


def belongs_to_the_tar(name: str) -> bool:
    """Return whether a file is of no sample by its name, as __meta__/info.json."""
    return _ABOUT_THE_TAR.match(name) is not None


def _of_samples(file: BinaryIO, name: str) -> Iterator[tuple[str, str, File]]:
    for member in files_of(file, name):
        match = _NAMED.fullmatch(member.name)
        if match is not None and not belongs_to_the_tar(member.name):
            yield match[1], match[2].lower(), member


def files_of(file: BinaryIO, name: str) -> Iterator[File]:
    """Yield the files of a tar, from its headers.

    Raises:
        DataError: it is no tar, or ends too early.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        try:
            yield from _quickly(file, size)
            return
        except _NotPlainError as error:
            after = error.after
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:  # long names, folders, other formats
            for member in archive:
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("unexpected end of data")
                if member.isreg() and member.offset_data >= after:
                    yield File(member.name, member.offset_data, member.size)
    except (tarfile.TarError, ValueError) as error:
        raise DataError(
            f"{name} cannot be read as a tar ({error}; it has {size:,} bytes). It is truncated,"
            " compressed, or another file: write it again, uncompressed."
        ) from error


class _NotPlainError(Exception):
    """A header that needs tarfile: that at this offset."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after


def _quickly(file: BinaryIO, size: int) -> Iterator[File]:
    """Yield the files of a tar whose headers are plain:
    a tenth of the time of tarfile, which a worker spends on each shard.
    """
    at = 0
    while True:
        file.seek(at)
        block = file.read(_BLOCK)
        if len(block) < _BLOCK:
            raise tarfile.ReadError("unexpected end of data")
        if block == bytes(_BLOCK):
            return
        numbers = block[124:136]
        if block[257:262] != b"ustar" or block[156:157] not in _PLAIN or numbers[0] & 0x80:
            raise _NotPlainError(at)
        count = int(numbers.rstrip(b"\0 ") or b"0", 8)
        offset = at + _BLOCK
        if offset + count > size:
            raise tarfile.ReadError("unexpected end of data")
        folder = block[345:500].rstrip(b"\0") if block[257:263] == b"ustar\0" else b""
        name = block[:100].partition(b"\0")[0]
        yield File(
            (folder + b"/" + name if folder else name).decode(errors="replace"), offset, count
        )
        at = offset + -(-count // _BLOCK) * _BLOCK
