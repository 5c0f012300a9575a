"""Draws docs/pictures/terminal.svg from a real run:
`python docs/pictures/terminal.py` (two minutes on 2 cores).
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = "horovodrun -np 2 python -m trainkit fit conf=resnet50 run_dir=runs/resnet50"


def recorded(folder: Path) -> str:
    """Run the command in a terminal of its own; return what it wrote."""
    ours, theirs = pty.openpty()
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "110",
        "TERM": "xterm-256color",
    }
    process = subprocess.Popen(
        COMMAND, shell=True, cwd=folder, env=env, stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    out = io.BytesIO()
    while True:
        try:
            out.write(os.read(ours, 4096))
        except OSError:  # the terminal's last user has closed it
            break
    if process.wait() != 0:
        raise SystemExit(out.getvalue().decode())
    return out.getvalue().decode()


def shown(text: str) -> list[str]:
    """Return the lines that stay on the screen,
    without the launcher's prefix and the progress bar.
    """
    lines = [
        line.rpartition("\r")[2] or line.rstrip("\r")
        for line in text.replace("\r\n", "\n").split("\n")
    ]
    plain = [re.sub(r"^(\x1b\[[\d;]*m)*\[\d\]<std(out|err)>:", "", line) for line in lines]
    return [
        line for line in plain if re.search(r"[a-z]", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line))
    ]


def main() -> None:
    """Write the picture."""
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        lines = shown(recorded(Path(folder)))
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), COMMAND))
    for line in lines:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="trainkit")
    Path(__file__).with_name("terminal.svg").write_text(svg)


if __name__ == "__main__":
    main()
