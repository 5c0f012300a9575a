"""Pictures, figures, texts, tables, sounds and histograms:
one call each, stored by every logger of the run that can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.metrics import media
from trainkit.metrics.media import Media


class LogsMedia:
    """The part of Task and Callback that logs what is no number. Call it in any hook or step; rank
    0's values are stored.

    The values are copied to the host, which waits for the device.
    """

    def log_image(self, name: str, image: Any, caption: str = "") -> None:
        """Log a picture: a tensor [C, H, W] or [H, W], an array [H, W, C], or a PIL image;
        floats from 0 to 1.
        """
        self._log_media(lambda: media.image(name, image, caption))

    def log_figure(self, name: str, figure: Any, caption: str = "") -> None:
        """Log a figure of matplotlib."""
        self._log_media(lambda: media.image(name, figure, caption))

    def log_text(self, name: str, text: str) -> None:
        """Log a text, in Markdown if the logger shows it."""
        self._log_media(lambda: Media("text", name, str(text)))

    def log_table(self, name: str, columns: Sequence[str] | None = None, rows: Any = ()) -> None:
        """Log a table: the names of its columns and its rows, or `rows` as a dict of columns."""
        self._log_media(lambda: media.table(name, columns, rows))

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """Log a sound of one channel: numbers from -1 to 1, and their rate in Hz."""
        self._log_media(lambda: media.audio(name, samples, sample_rate))

    def log_histogram(self, name: str, values: Any) -> None:
        """Log the distribution of a tensor's numbers."""
        self._log_media(lambda: media.histogram(name, values))

    if TYPE_CHECKING:

        def _log_media(self, make: Callable[[], Media]) -> None:
            """Hand over what `make` returns; Task and Callback each define it."""
