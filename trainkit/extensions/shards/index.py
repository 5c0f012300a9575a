"""The shards of a data set and their samples: index.json beside them, in wids' format, with a few
keys of its own.

    {"wids_version": 1, "classes": ["cat", "dog"],
     "shardlist": [{"url": "000000.tar", "nsamples": 1021, "filesize": 268435456, "sha256": "...",
     "classes": 2}, ...]}

`data pack` writes it. For shards of other programs it is made once, by reading all of them
(index_maker.py).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trainkit.errors import ConfigError, DataError
from trainkit.extensions.shards.store import ShardStore, joined

INDEX = "index.json"
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True)
class Shard:
    """A tar file.

    Attributes:
        url: its path or URL.
        samples: in it.
        size: its bytes.
        sha256: of its content; "" if unknown.
        classes: different labels in it; 0 if unknown.
    """

    url: str
    samples: int
    size: int
    sha256: str = ""
    classes: int = 0

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Index:
    """All shards of a data set, in their order, which numbers the samples.

    Attributes:
        shards: one at least, with a sample at least.
        classes: the names of the labels, if known.
    """

    shards: tuple[Shard, ...]
    classes: tuple[str, ...] = ()

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """The number of samples up to each shard's last one."""
        return np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """Of all shards."""
        return int(self.ends[-1])

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.size for shard in self.shards)

    def locate(self, index: int) -> tuple[int, int]:
        """Return a sample's shard and its place there."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        return number, index - int(self.ends[number]) + self.shards[number].samples

    def to_json(self, root: str = "") -> bytes:
        """Return the file; URLs below `root` are written without it."""
        start = f"{root.rstrip('/')}/" if root else ""
        rows = []
        for shard in self.shards:
            row = asdict(shard)
            rows.append({"url": row.pop("url").removeprefix(start), "nsamples": row.pop("samples")})
            rows[-1] |= {
                "filesize": row.pop("size"),
                **{key: value for key, value in row.items() if value},
            }
        about = {"wids_version": 1, "classes": list(self.classes), "shardlist": rows}
        return (json.dumps(about, indent=1) + "\n").encode()


def index_of(content: bytes, root: str, name: str) -> Index:
    """Return the index of a file's content; relative URLs are in `root`.

    Raises:
        DataError: it is none.
    """
    try:
        about = json.loads(content)
        rows = [
            Shard(
                joined(root, str(row["url"])),
                int(row["nsamples"]),
                int(row["filesize"]),
                str(row.get("sha256", "")),
                int(row.get("classes", 0)),
            )
            for row in about["shardlist"]
        ]
        classes = tuple(map(str, about.get("classes", ())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{name} is no index of shards ({type(error).__name__}: {error}). Delete it, and it is"
            " made again from the shards; or write them again: python -m trainkit data pack IMAGES"
            " output=..."
        ) from error
    if not any(shard.samples for shard in rows):
        raise DataError(f"{name} lists no samples.")
    return Index(tuple(shard for shard in rows if shard.samples), classes)


def find_index(root: str, store: ShardStore) -> Index | None:
    """Return the index that stands in a folder or at a URL, or None."""
    name = joined(root, INDEX)
    try:
        content = store.read(name)
    except FileNotFoundError:
        return None
    return index_of(content, root, name)


def urls_of(patterns: str | Sequence[str], store: ShardStore, key: str) -> list[str]:
    """Return the shards that patterns name: paths or URLs, braces as in bash, * for any.

    Args:
        key: the setting that holds them, for messages.

    Raises:
        ConfigError: they name none.
    """
    urls: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for url in _spelled_out(pattern, f"{key} is '{pattern}'"):
            urls += store.matching(url) if re.search(r"[*?\[]", url) else [url]
    if not urls:
        raise ConfigError(
            f"{key} is '{patterns}', which no file matches. Give tars:"
            " s3://bucket/train-{000..127}.tar, or *.tar."
        )
    if len({*urls}) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ConfigError(
            f"{key} names {twice} twice; its samples would be trained on twice. Leave one out."
        )
    return urls


def _spelled_out(pattern: str, given: str) -> list[str]:
    """Return the patterns without braces, in the order of braceexpand (WebDataset's) and bash:
    {000..127} is counted, as are {9..0..3} and {a..f}, and {a,b} is listed.

    Args:
        given: the setting and its value, for messages.
    """
    begin = pattern.find("{")
    cuts = _cuts(pattern, begin) if begin >= 0 else []
    before = pattern[:begin] if cuts else pattern
    if "{" in before or "}" in before or re.search(r"\\[{},]", pattern):
        raise ConfigError(
            f"{given}; each {{ needs its }}, and a backslash does not escape them:"
            " rename files that have them."
        )
    if not cuts:
        return [pattern]
    inner = pattern[begin + 1 : cuts[-1]]
    texts = _counted(inner)
    if texts is None and len(cuts) == 2:
        raise ConfigError(
            f"{given}; braces hold numbers, letters or a list, as {{000..127}}, {{a..f}}"
            " or {a,b}."
        )
    if texts is None:
        parts = [pattern[low + 1 : high] for low, high in pairwise(cuts)]
        texts = [text for part in parts for text in _spelled_out(part, given)]
    after = _spelled_out(pattern[cuts[-1] + 1 :], given)
    return [f"{before}{text}{rest}" for text in texts for rest in after]


def _cuts(pattern: str, begin: int) -> list[int]:
    """Return the places of a brace, of the commas in it and of its other end; none without one."""
    depth, places = 0, list[int]()
    for place in range(begin, len(pattern)):
        letter = pattern[place]
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return [*places, place]
        if place == begin or (letter == "," and depth == 1):
            places.append(place)
    return []


def _counted(inner: str) -> list[str] | None:
    """Return what {first..last..step} counts, up or down; None of another text. Numbers have the
    width of the longer end if one begins with a zero.
    """
    numbers = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?", inner, re.ASCII)
    letters = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?", inner, re.ASCII)
    if numbers is not None:
        ends = numbers[1], numbers[2]
        is_padded = any(re.match(r"-?0", end) and end not in ("0", "-0") for end in ends)
        width = max(map(len, ends)) if is_padded else 0
        return [f"{number:0{width}d}" for number in _steps(int(ends[0]), int(ends[1]), numbers[3])]
    if letters is not None:
        first, last = (_LETTERS.index(end) for end in (letters[1], letters[2]))
        return [_LETTERS[place] for place in _steps(first, last, letters[3])]
    return None


def _steps(first: int, last: int, step: str | None) -> range:
    size = int(step or 1) or 1
    return range(first, last + 1, size) if first < last else range(first, last - 1, -size)
