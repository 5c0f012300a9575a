"""The calls of Lightning's WandbLogger for pictures, sounds, videos and tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from trainkit.api.media_logging import LogsMedia
from trainkit.errors import ConfigError
from trainkit.loggers.base import refuse_on_main


class WandbMedia(LogsMedia):
    """The calls of a Task and of Callbacks, which every logger of the run stores; and with `key`, a
    list, or `step` those of Lightning's WandbLogger, which W&B alone gets. For hooks, from
    on_fit_start to on_fit_end; other ranks ignore them.
    """

    def log_image(
        self,
        name: str = "",
        image: Any = None,
        caption: Any = "",
        *,
        key: str = "",
        images: list[Any] | None = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Log a picture, or a list of them: tensors, arrays, PIL images or paths.

        Args:
            name: of the panel; `key` is the same.
            image: the picture, or the list; `images` is the same.
            caption: of the picture; of a list one for each.
            key: see `name`.
            images: see `image`.
            step: on the axis; default: the run's.
            options: lists with an item for each picture of a list: masks, boxes.

        Raises:
            ConfigError: `images` is of another type than list, or an option has another length.
        """
        if not (key or images is not None or isinstance(image, list)):
            if step is None and not options:
                super().log_image(name, image, caption)
                return
            images, caption = (
                [image],
                [caption] if caption and isinstance(caption, str) else caption,
            )
        items = image if images is None else images
        own = {"caption": caption, **options} if caption else options
        _log_each(self, "Image", key or name, items, step, own)

    def log_audio(
        self,
        name: str = "",
        samples: Any = None,
        sample_rate: Any = 0,
        *,
        key: str = "",
        audios: list[Any] | None = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Log a sound, or a list of them: see `log_image`. Of a list: arrays or paths, with
        sample_rate=[Hz, ...] and caption=[...].
        """
        if not (key or audios is not None or isinstance(samples, list)):
            if step is None and not options:
                super().log_audio(name, samples, sample_rate)
                return
            audios = [samples]
            sample_rate = [sample_rate] if isinstance(sample_rate, int) else sample_rate
        items = samples if audios is None else audios
        own = {"sample_rate": sample_rate, **options} if sample_rate else options
        _log_each(self, "Audio", key or name, items, step, own)

    def log_video(
        self, key: str, videos: list[Any], step: int | None = None, **options: Any
    ) -> None:
        """Log videos, arrays or paths, with caption=[...], fps=[...] and format=[...]."""
        _log_each(self, "Video", key, videos, step, options)

    def log_table(
        self,
        name: str = "",
        columns: Sequence[str] | None = None,
        rows: Any = (),
        dataframe: Any = None,
        step: int | None = None,
        *,
        key: str = "",
        data: list[list[Any]] | None = None,
    ) -> None:
        """Log a table: columns and rows (`data` is the same), or a DataFrame."""
        if key or data is not None or dataframe is not None or step is not None:
            held = None if dataframe is not None else list(data or rows)
            head = None if columns is None else list(columns)
            _log_made(
                self,
                key or name,
                lambda wandb: wandb.Table(columns=head, data=held, dataframe=dataframe),
                step,
            )
        else:
            super().log_table(name, columns, rows)

    def log_text(
        self,
        name: str = "",
        text: Any = None,
        data: list[list[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        key: str = "",
        columns: list[str] | None = None,
    ) -> None:
        """Log a text, or a table of texts: see `log_table`."""
        if isinstance(text, str) and step is None:
            super().log_text(name, text)
        elif isinstance(text, str):
            self.log_table(name, ["text"], [[text]], step=step)
        else:
            columns = text if columns is None else columns
            self.log_table(
                columns=columns, data=data, dataframe=dataframe, step=step, key=key or name
            )


def _log_each(
    logger: Any, kind: str, key: str, items: Any, step: int | None, options: dict[str, Any]
) -> None:
    """Make W&B's `kind` of each item, with its own options, and log them as one value."""
    where = f"WandbLogger.log_{kind.lower()}('{key}')"
    if not isinstance(items, list):
        raise ConfigError(
            f"{where} has a {type(items).__name__} for its list of {kind.lower()}s: write [x], also"
            " for one."
        )
    for name, values in options.items():
        if not isinstance(values, (list, tuple)) or len(values) != len(items):
            raise ConfigError(
                f"{where} has {len(items)} {kind.lower()}s, and {name} is {values!r}: it must be a"
                " list with an item for each."
            )
    own = [{name: options[name][i] for name in options} for i in range(len(items))]
    _log_made(
        logger,
        key,
        lambda wandb: [getattr(wandb, kind)(x, **o) for x, o in zip(items, own, strict=True)],
        step,
    )


def _log_made(logger: Any, key: str, make: Callable[[Any], Any], step: int | None) -> None:
    """Queue what `make` returns, made now: its tensors may change. Only the logging rank calls it.

    Raises:
        ConfigError: on rank 0, if the logger is not open.
    """
    if logger._background is None:
        refuse_on_main(logger, f"log of '{key}'")
        return
    here, _ = logger._background.position()
    axis = here if step is None else step
    made = {key: make(logger._wandb)}
    work = functools.partial(_log_row, logger, made, axis, here)
    logger.hand_over(f"writing '{key}' of step {axis}", work)


def _log_row(logger: Any, values: dict[str, Any], axis: int, here: int) -> None:
    logger._rows.log(logger._run, values, axis, here)
