"""Copies as a store of checkpoints: each rank's file goes to the copy server of its own host, and of
other ones; a run resumes from it as from a folder, without reading one.

    write_part   this rank's file -> the servers of its holders
    write        rank 0: training.pt -> its holders; the manifest -> all servers, which makes a set whole
    names        the newest set of which the servers hold all files
    fetch        a folder of this rank alone, on no disk: its own file as a link to memory, and of the
                 others' the tensors that it does not have itself
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainkit.checkpoint.format import MANIFEST, TRAINING, Snapshot, write
from trainkit.checkpoint.parts import RankFile, await_parts, file_of
from trainkit.checkpoint.store import Store, Take, nothing_left
from trainkit.errors import CheckpointError
from trainkit.extensions.elastic.copies.layout import LENGTH, as_file, spans_in
from trainkit.extensions.elastic.copies.peers import Peers
from trainkit.extensions.object_store.transfer import transfer_folder


class PeerStore(Store):
    """See the module.

    Args:
        peers: the copy servers.
        file: this rank's, in a set of as many ranks as there are.
        is_fresh: returns whether a copy of a step is as new as copies should be.
        is_expected: whether there should be copies: all ranks were replaced.
        say: prints a sentence.

    Attributes:
        came_first: whether no checkpoint was looked at.
        fetched: the set that this rank has a folder of; "" for none.
    """

    place = "the memory of peers"
    compares = True

    def __init__(
        self,
        peers: Peers,
        file: str,
        is_fresh: Callable[[int], bool],
        is_expected: bool,
        say: Callable[[str], None],
    ) -> None:
        self.peers, self._file = peers, file
        self._is_fresh, self._is_expected, self._say = is_fresh, is_expected, say
        self._is_released = self.came_first = False
        self._names: list[str] | None = None
        self.fetched = ""
        self._folder = Path()
        self._stack = contextlib.ExitStack()

    # ---- a copy is made

    def write_part(self, name: str, part: RankFile) -> dict[str, Any]:
        about = self.peers.send(name, file_of(part.rank, part.ranks), as_file(part.tensors))
        return about | {"boxes": part.boxes}

    def write(self, name: str, snapshot: Snapshot, take: Take = nothing_left) -> None:
        assert snapshot.part is not None, "each rank holds a part of the weights"
        parts = await_parts(take, self._size_of(name), snapshot.part)
        with transfer_folder() as folder:
            write(folder, snapshot, parts)
            self.peers.send(name, TRAINING, [memoryview((folder / TRAINING).read_bytes())])
            manifest = memoryview((folder / MANIFEST).read_bytes())
        self.peers.send_to_all(name, MANIFEST, [manifest])

    def _size_of(self, name: str) -> Callable[[str], int | None]:
        sizes: dict[str, int] = {}

        def size_of(file: str) -> int | None:
            if file not in sizes:
                self.peers.look()
                sizes.update(self.peers.files_of(name))
            return sizes.get(file)

        return size_of

    # ---- a run resumes

    def names(self) -> list[str]:
        """Return the newest set that is whole, in a list; report a newer one that is not, once."""
        if self._is_released:
            return []
        if self._names is None:
            self._names = self._newest_whole()
        return self._names

    def _newest_whole(self) -> list[str]:
        known = self.peers.look().values()
        ended = {name for sets in known for name, files in sets.items() if MANIFEST in files}
        lost = ""
        for name in sorted(ended, key=step_of, reverse=True):
            there = self.peers.files_of(name).keys()
            missing = sorted(self._manifest_of(name)["files"].keys() - there)
            if not missing:
                return [name]
            more = f" and {len(missing) - 1} more files" * (len(missing) > 1)
            lost = lost or (
                f"The copy of step {step_of(name)} in the memory of peers is not whole: all hosts that"
                f" held {missing[0]}{more} are lost."
            )
        if self._is_expected or lost:
            lost = (
                lost or "No host holds a copy in its memory: those that did are lost, or none did."
            )
            self._say(f"{lost} The run resumes from its newest checkpoint, if it has one.")
        return []

    @property
    def comes_first(self) -> bool:
        """Whether the newest set is taken without a look at checkpoints: so none of them is read."""
        names = self.names()
        self.came_first = bool(names) and self._is_fresh(step_of(names[0]))
        return self.came_first

    @contextlib.contextmanager
    def fetch(self, name: str, manifest_alone: bool = False) -> Iterator[Path]:
        if not self.peers.known:
            self.peers.look()
        if manifest_alone:
            with transfer_folder() as folder:
                (folder / MANIFEST).write_bytes(self.peers.read(name, MANIFEST))
                yield folder
            return
        if self.fetched != name:  # rank 0 looks at it before the others do
            self._stack.close()
            self.fetched = ""
            self._folder = self._stack.enter_context(transfer_folder())
            self._fill(name, self._folder)
            self.fetched = name
        yield self._folder

    def release(self) -> None:
        """Free what was fetched; there are no checkpoints here from now on."""
        self._stack.close()
        self._is_released, self.fetched = True, ""

    def _fill(self, name: str, folder: Path) -> None:
        manifest = self._manifest_of(name)
        for file in (MANIFEST, TRAINING):
            (folder / file).write_bytes(self.peers.read(name, file))
        needed: dict[str, list[str]] = {}
        for key, entry in manifest["pieces"].items():
            boxes = {box[0] for box in entry["boxes"]}
            for file in [self._file] if self._file in boxes else boxes:
                needed.setdefault(file, []).append(key)
        for file, keys in needed.items():
            about = manifest["files"][file]
            link = self._in_memory(file, about["bytes"])
            (folder / file).symlink_to(link)
            with link.open("r+b") as memory:
                if file != self._file:
                    self._fill_some(name, file, keys, memory)
                    continue
                data = self.peers.read(name, file)
                if hashlib.sha256(data).hexdigest() != about["sha256"]:
                    raise CheckpointError(f"{self.path_of(name)} is damaged: {file} has changed.")
                memory.write(data)

    def _in_memory(self, file: str, size: int) -> Path:
        """Return a new file of this size, all zeros, in this process's memory."""
        descriptor = os.memfd_create(file)
        self._stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, size)
        return Path(f"/proc/self/fd/{descriptor}")

    def _fill_some(self, name: str, file: str, keys: Sequence[str], memory: Any) -> None:
        """Fill a safetensors file's header, and the tensors with these keys."""
        length = self.peers.read(name, file, 0, LENGTH)
        end = LENGTH + int.from_bytes(length, "little")
        header = self.peers.read(name, file, LENGTH, end)
        memory.write(length + header)
        for span in spans_in(header, keys):
            memory.seek(span.start)
            memory.write(self.peers.read(name, file, *span))

    def _manifest_of(self, name: str) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.peers.read(name, MANIFEST))
        return manifest

    # ---- what a store of checkpoints has beside

    def remove(self, name: str) -> None:
        """Do nothing: a server drops the sets before the newest whole one."""

    def point(self, link: str, name: str) -> None:
        """Do nothing: there are no links."""

    def target(self, link: str) -> None:
        """Return None: there are no links."""

    def tidy(self) -> None:
        """Do nothing: what a rank has begun to send is dropped with the next set."""


def name_of(step: int, generation: int) -> str:
    """Return a set's name; what an earlier generation has sent of the same step is another set."""
    return f"step={step}-generation={generation}"


def step_of(name: str) -> int:
    """Return the step of a set."""
    return int(name.split("-")[0].removeprefix("step="))
