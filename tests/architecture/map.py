"""The map of the house in CONTRIBUTING.md: each room by the first line of its docstring, on its
floor of test_layering.

`python -m tests.architecture.map` writes it; test_map.py compares it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.architecture.test_layering import FLOORS, ROOT

PAGE = ROOT.parent / "CONTRIBUTING.md"
_BEGIN, _END = "<!-- map: python -m tests.architecture.map -->\n", "<!-- end of map -->"


def table() -> str:
    """Return the table of rooms, the highest floor first, and that of extensions."""
    rows = [
        f"| {floor} | `{_shown(room)}` | {about(_file(ROOT / room))} |"
        for floor, rooms in reversed([*enumerate(FLOORS)])
        for room in rooms
        if room != "extensions"
    ]
    folders = sorted(path.parent for path in (ROOT / "extensions").glob("*/__init__.py"))
    beside = [f"| | `extensions/{folder.name}/` | {about(_file(folder))} |" for folder in folders]
    return "\n".join(["| floor | room | what it holds |", "|---|---|---|", *rows, *beside, ""])


def about(file: Path) -> str:
    """Return the first sentence of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", r"\|")


def in_page(text: str) -> str:
    """Return the map that a page has."""
    return text.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the map."""
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(
            f"{re.escape(_BEGIN)}.*?{re.escape(_END)}",
            lambda _: f"{_BEGIN}{table()}{_END}",
            text,
            flags=re.DOTALL,
        )
    )


def _file(room: Path) -> Path:
    return room / "__init__.py" if room.is_dir() else room.with_suffix(".py")


def _shown(room: str) -> str:
    return f"{room}/" if (ROOT / room).is_dir() else f"{room}.py"


if __name__ == "__main__":
    main()
