"""CheckpointLogger: base of loggers that also upload checkpoints after they are written."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.checkpoint.format import MANIFEST
from trainkit.checkpoint.store import LINKS, Store
from trainkit.console import warning
from trainkit.errors import clause
from trainkit.loggers.base import Logger

LogModel = bool | Literal["all"]


class CheckpointLogger(Logger):
    """Uploads checkpoints in its thread, by `log_model`: true: those that are there if a fit ends
    well, as the save_top_k best; "all": each one that exists when it checks, at a log step after a checkpoint was
    written.
    """

    log_model: LogModel = False
    _stores: tuple[Store, ...] = ()
    _is_new = False
    _uploaded: dict[str, set[str]]  # path -> the aliases it was uploaded with

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Reset. A resumed run uploads its checkpoints again;
        both services recognise identical content.
        """
        self._uploaded = {}
        self._is_new = False
        self._stores = tuple(trainer.checkpoints.stores)
        super().on_fit_start(trainer, task)

    def on_save_checkpoint_end(self, trainer: RunView, task: Task) -> None:
        self._is_new = True

    def on_metrics(
        self, trainer: RunView, task: Task, metrics: dict[str, float], step: int
    ) -> None:
        super().on_metrics(trainer, task, metrics, step)
        if self.log_model == "all" and self._is_new and not trainer.checkpoints.writer.is_busy:
            self._is_new = False
            self.hand_over("uploading checkpoints", self._upload_new)

    def on_fit_end(self, trainer: RunView, task: Task) -> None:
        if self.log_model:
            self.hand_over("uploading checkpoints", self._upload_new)
        super().on_fit_end(trainer, task)

    def _upload_new(self) -> None:
        for store in self._stores:
            links = {link: store.target(link) for link in LINKS}
            named = {
                name: tuple(link for link in LINKS if links[link] == name) for name in store.names()
            }
            # "last" last: a service labels the newest upload "latest"
            for name, aliases in sorted(named.items(), key=lambda item: "last" in item[1]):
                given = self._uploaded.get(store.path_of(name))
                if given is None or set(aliases) - given:
                    self._try_upload(store, name, aliases)
                    self._uploaded[store.path_of(name)] = {*aliases, *(given or ())}

    def _try_upload(self, store: Store, name: str, aliases: tuple[str, ...]) -> None:
        try:
            with store.fetch(name) as folder, _held(Path(folder)) as held:
                self.upload(held, name, aliases)
        except Exception as error:  # the checkpoint may be deleted by now; logging must continue
            if name in store.names():
                reason = f"{type(error).__name__}: {error}"
                warning(
                    f"{type(self).__name__} did NOT upload the checkpoint {name}: {clause(reason)}."
                    " Training continues."
                )

    @abstractmethod
    def upload(self, folder: Path, name: str, aliases: tuple[str, ...]) -> None:
        """Upload a folder, which may be deleted afterwards;
        `aliases`: the ones of "last" and "best" that it is now.
        """


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[Path]:
    """Yield a folder of the same files, which stay while the fit removes the checkpoint: a part of
    it would be uploaded.
    """
    # a name that the next start tidies away, if this process is killed
    held = folder.with_name(f".{folder.name}.uploaded.{os.getpid()}.draft")
    try:
        try:
            shutil.copytree(folder, held, copy_function=os.link)
        except OSError:
            if not (folder / MANIFEST).is_file():
                raise
            yield folder  # on a disk without hard links
            return
        yield held
    finally:
        shutil.rmtree(held, ignore_errors=True)
