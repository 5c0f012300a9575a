"""A disk of a storm's own: a small tmpfs that can be filled.
Mount it before the hosts start: they copy the table of mounts.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from types import TracebackType

SIZE = "48m"


class Disk:
    """A small disk at a folder; a context manager. Where no mount is permitted it is a plain
    folder.

    Attributes:
        is_own: whether it is mounted, and so can be filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_own = folder, False

    def __enter__(self) -> Disk:
        self.folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(self.folder)]
        self.is_own = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_own:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)

    @property
    def is_full(self) -> bool:
        """Whether `fill` took what was left."""
        return (self.folder / "filler").exists()

    def fill(self) -> None:
        """Take what is left."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def free(self) -> None:
        """Give it back."""
        (self.folder / "filler").unlink()
