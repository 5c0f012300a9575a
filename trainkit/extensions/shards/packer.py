"""Writes an image folder as shards: `python -m trainkit data pack IMAGES output=FOLDER|URL`.

images_of -> shuffled by a seed, cut into shards -> packing.json: the plan, and the shards that are
complete -> each shard as a tar on this machine, then copied as a whole -> index.json, last ->
packing.json is deleted

A folder without index.json is not complete; the same command then continues with the first shard
that is missing. A shard is the same bytes whenever and wherever it is written, so that two writers
cannot disagree.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.console import plural
from trainkit.errors import ConfigError, DataError, clause
from trainkit.extensions.shards.index import INDEX, Index, Shard, find_index
from trainkit.extensions.shards.store import ShardStore, joined
from trainkit.extensions.shards.tar import belongs_to_the_tar

PACKING = "packing.json"
KINDS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PARTS = ("train", "val")
_BLOCK = 512


@dataclass(frozen=True)
class Image:
    """A file, the number of its class, and its key in the shards."""

    path: Path
    label: int
    key: str
    size: int


@dataclass(frozen=True)
class Packing:
    """What is to be written to one place.

    Attributes:
        output: the folder or URL.
        classes: their names.
        shards: the images of each.
        digest: of all that the shards depend on.
    """

    output: str
    classes: tuple[str, ...]
    shards: tuple[tuple[Image, ...], ...]
    digest: str

    @property
    def num_bytes(self) -> int:
        """Of all images."""
        return sum(image.size for shard in self.shards for image in shard)


def plan_of(source: Path, output: str, shard_bytes: int, seed: int = 0) -> list[Packing]:
    """Return what to write: train/ and val/ of a folder that has them, else the folder itself.

    Args:
        source: ImageNet's layout, train/<class>/*.jpg; or <class>/*.jpg.
        shard_bytes: of a shard, about.
        seed: of the order of the images, so that each shard has all kinds of them.

    Raises:
        DataError: there are no images, or train/ and val/ have other classes.
    """
    if not source.is_dir():
        raise DataError(
            f"{source} is no folder; give one of images, as train/<class>/*.jpg and"
            " val/<class>/*.jpg."
        )
    parts = [part for part in PARTS if (source / part).is_dir()] or [""]
    packings = [
        _plan(source / part, joined(output, part) if part else output, shard_bytes, seed)
        for part in parts
    ]
    if len(packings) == 2 and packings[0].classes != packings[1].classes:
        other = sorted({*packings[0].classes} ^ {*packings[1].classes})
        raise DataError(
            f"{source}: train/ and val/ have other classes: {', '.join(other[:5])}. Both need the"
            " same folders."
        )
    return packings


def _plan(folder: Path, output: str, shard_bytes: int, seed: int) -> Packing:
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    images = list(_images(folder, classes))
    if not images:
        raise DataError(
            f"{folder} has no images in folders of classes: <class>/*.jpg ({', '.join(KINDS)})."
        )
    random.Random(seed).shuffle(images)
    shards = [list[Image]()]
    size = 0
    for image in images:
        if shards[-1] and size + _in_tar(image.size) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(image)
        size += _in_tar(image.size)
    listed = [
        classes,
        [[(image.key, image.path.suffix, image.size) for image in shard] for shard in shards],
    ]
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return Packing(output, classes, tuple(map(tuple, shards)), digest)


def _in_tar(size: int) -> int:
    return 3 * _BLOCK + -(-size // _BLOCK) * _BLOCK  # two headers and the label


def _images(folder: Path, classes: Sequence[str]) -> Iterable[Image]:
    for label, name in enumerate(classes):
        taken: set[str] = set()
        for path in sorted((folder / name).rglob("*")):
            if path.suffix.lower() not in KINDS:
                continue
            inside = path.relative_to(folder).with_suffix("").as_posix()
            key = first = (
                inside.rpartition("/")[0] + "/" + inside.rpartition("/")[2].replace(".", "_")
            )
            if belongs_to_the_tar(key):  # a class "__other__"
                key = first = f"./{key}"
            while key in taken:  # a.jpg and a.png
                key = f"{first}-{len(taken)}"
            taken.add(key)
            yield Image(path, label, key, path.stat().st_size)


def pack(
    packing: Packing,
    store: ShardStore,
    moved: Callable[[int], object] = lambda num_bytes: None,
    workers: int = 4,
) -> Index:
    """Write the shards that are missing, then the index, and return it.

    Args:
        moved: receives the bytes of images written, as they grow.
        workers: shards that are written at the same time.

    Raises:
        ConfigError: the place holds other shards.
        DataError: an image cannot be read, the store cannot be reached, or the disk is full.
    """
    if find_index(packing.output, store) is not None:
        raise ConfigError(
            f"output is '{packing.output}', which holds shards already ({INDEX}). Give another"
            " place, or empty it."
        )
    journal = joined(packing.output, PACKING)
    done = _done_before(packing, store, journal)
    written = sum(image.size for number in done for image in packing.shards[number])
    moved(written)

    def work(number: int) -> Shard:
        return _write(packing, number, store)

    missing = [number for number in range(len(packing.shards)) if number not in done]
    with ThreadPoolExecutor(workers) as pool:
        try:
            for number, shard in zip(missing, pool.map(work, missing), strict=True):
                done[number] = shard
                _note(journal, packing, done, store)
                written += sum(image.size for image in packing.shards[number])
                moved(written)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    index = Index(tuple(done[number] for number in sorted(done)), packing.classes)
    store.write(joined(packing.output, INDEX), index.to_json(packing.output))
    store.remove(journal)
    return index


def _done_before(packing: Packing, store: ShardStore, journal: str) -> dict[int, Shard]:
    """Return the shards that an interrupted packing has completed."""
    try:
        about: dict[str, Any] = json.loads(store.read(journal))
    except FileNotFoundError:
        others = store.matching(joined(packing.output, "*.tar"))
        if others:
            raise ConfigError(
                f"output is '{packing.output}', which holds {plural(len(others), 'tar')} of another"
                " program. Give an empty place."
            ) from None
        _note(journal, packing, {}, store)
        return {}
    except ValueError as error:
        raise DataError(
            f"{journal} cannot be read ({error}). Empty the place, and pack again."
        ) from error
    if about.get("digest") != packing.digest:
        raise ConfigError(
            f"output is '{packing.output}', which holds a part of another packing: the images,"
            " shard_mb or seed differ. Type them as before, or empty the place."
        )
    done = {int(number): Shard(**row) for number, row in about["done"].items()}
    return {number: shard for number, shard in done.items() if _is_there(shard, store)}


def _is_there(shard: Shard, store: ShardStore) -> bool:
    try:
        return store.size(shard.url) == shard.size
    except FileNotFoundError:
        return False


def _note(journal: str, packing: Packing, done: dict[int, Shard], store: ShardStore) -> None:
    about = {
        "digest": packing.digest,
        "done": {number: asdict(shard) for number, shard in done.items()},
    }
    store.write(journal, json.dumps(about).encode())


def _write(packing: Packing, number: int, store: ShardStore) -> Shard:
    images = packing.shards[number]
    url = joined(packing.output, f"{number:06d}.tar")
    with tempfile.TemporaryDirectory(prefix="trainkit-pack-") as folder:
        path = Path(folder, "shard.tar")
        try:
            with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
                for image in images:
                    _add(tar, f"{image.key}{image.path.suffix.lower()}", image.path.read_bytes())
                    _add(tar, f"{image.key}.cls", str(image.label).encode())
            sha256 = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    sha256.update(block)
            size = path.stat().st_size
            store.put(path, url)
        except OSError as error:
            raise DataError(
                f"{url} was not written: {clause(error)}. What is complete stays: the same command"
                " continues."
            ) from error
    return Shard(url, len(images), size, sha256.hexdigest(), len({image.label for image in images}))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    header = tarfile.TarInfo(name)  # no time and no owner: the same bytes each time
    header.size = len(content)
    tar.addfile(header, io.BytesIO(content))
