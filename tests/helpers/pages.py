"""The code blocks of a page of Markdown, and how a test runs them: top to bottom, in one folder,
made small.

A block of Python, YAML or TOML whose first line is a comment with a file's name is that file. Shell
commands are run as they are written, but for `shrunk`. A comment before a block says what is
special about it:

    <!-- not run: why -->         its commands are not run here
    <!-- ends with: 75; why -->   the exit code of its last command; "not 0" for any other
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launching import run_command
from tests.helpers.page_tests import ELSEWHERE, TESTS

ROOT = Path(__file__).parents[2]
_HEADING = re.compile(r"^```.*?^```|^(?P<level>#+) (?P<title>[^\n]+)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"(?:<!-- ([^>]*?) -->\n)?^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./]+\.(?:py|yaml|toml))\n")
_SMALL_STEPS = " trainer.max_steps=2 trainer.limit_val_batches=1"


@dataclass(frozen=True)
class Block:
    """A code block, and the comment before it."""

    comment: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        named = _FILE.match(self.text)
        return (
            named[1] if named is not None and self.language in ("python", "yaml", "toml") else None
        )

    @property
    def content(self) -> str:
        """The file without the line that names it: an experiment's first line must be another."""
        return self.text.partition("\n")[2]

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block without their comments; `\\` joins lines."""
        if self.language != "sh":
            return []
        lines = [
            re.split(r"\s{2,}#|\s#\s", line)[0].strip()
            for line in self.text.replace("\\\n", " ").splitlines()
        ]
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def is_run(self) -> bool:
        """Whether its commands run here."""
        return not self.comment.startswith("not run: ")

    def is_expected(self, code: int) -> bool:
        """Return whether the last command may end with this code."""
        ends = re.match(r"ends with: (not 0|\d+)", self.comment)
        return (
            code == 0 if ends is None else code != 0 if ends[1] == "not 0" else code == int(ends[1])
        )


def part(page: Path, title: str | None = None) -> str:
    """Return a part of a page.

    Args:
        title: its heading, up to the next one of its level or above; "" is the page without the
            parts that have tests of their own (page_tests); None, the whole page.
    """
    text = page.read_text()
    if title is None:
        return text
    if title:
        start, end = _place(text, title)
        return text[start:end]
    for own in filter(None, TESTS[page.stem]):
        start, end = _place(text, own)
        text = text[:start] + text[end:]
    return text


def _place(text: str, title: str) -> tuple[int, int]:
    headings = [match for match in _HEADING.finditer(text) if match["level"]]
    (head,) = [match for match in headings if match["title"] == title]
    after = [
        match.start()
        for match in headings
        if match.start() > head.start() and len(match["level"]) <= len(head["level"])
    ]
    return head.start(), after[0] if after else len(text)


def blocks(page: Path, title: str | None = None) -> list[Block]:
    """Return the code blocks of a page, or of a part of it, in order."""
    return [
        Block(comment or "", language, text)
        for comment, language, text in _BLOCK.findall(part(page, title))
    ]


def commands(page: Path, title: str | None = None) -> Iterator[str]:
    """Yield the commands that run of a page, or of a part of it."""
    for block in blocks(page, title):
        if block.is_run:
            yield from block.commands


def shrunk(line: str) -> str:
    """Return a command that takes seconds: small batches and images, a few steps."""
    words = line.replace("data.root=/data/imagenet", "data.root=images").replace(
        "max_epochs=90", "max_epochs=1"
    )
    if not re.search(r"-m trainkit \w", words) or re.search(r"\s\S+\.py(\s|$)", words):
        return words  # what stands after a script is the script's
    trains = re.search(r" (fit|find|scaling) ", words) is not None and "dry_run" not in words
    if trains and "conf=resnet50" in words and "task.model" not in words:
        words += " task.model=resnet18"
    if "imagefolder" in words:
        return (
            words + " data.num_classes=2 data.image_size=32 data.batch_size=2 trainer.max_steps=2"
            " data.num_workers=1"
        )
    large = re.search(r"conf=(resnet|gpt|hf_|bert|recommender)", words) is not None
    if " scaling " in words:
        return words + " steps=2"
    if "check-engine" in words:
        return words.replace("check-engine", "check-engine steps=1")
    if "check-resume" in words:
        return words.replace("kill_at=17", "kill_at=3 steps=4")
    if " fit " in words and not re.search(r" --(cfg|help)| -m ", words.split("trainkit", 1)[1]):
        words = words.replace("max_epochs=60", "max_epochs=2")
        if large:
            words += _SMALL_STEPS.replace("=2", "=4") if "ckpt_path" in words else _SMALL_STEPS
            words += " data.batch_size=2" * ("data.batch_size" not in words)
        if "callbacks=timeline" in words:
            words += " callbacks.timeline.start_step=0 callbacks.timeline.num_steps=2"
    elif " find " in words and "settings" not in words:
        words += " steps=20" if " batch " not in words else ""
        words += " data.batch_size=2" * large
    elif re.search(r" (validate|test|predict) ", words):
        words += "".join(f" trainer.limit_{kind}_batches=1" for kind in ("val", "test", "predict"))
    return words


def prepare(folder: Path) -> None:
    """Write what pages expect to be there: images, a text, an executable list of hosts."""
    from tests.e2e.test_bad_input import (
        write_images,
    )  # noqa: PLC0415 - it needs the command fixture's imports

    write_images(folder)
    (folder / "my.txt").write_text("to be or not to be\n" * 400)


def run_page(page: Path, folder: Path, timeout_s: float = 240, title: str | None = None) -> int:
    """Run a page, or a part of it, top to bottom, but for what another page runs (ELSEWHERE);
    return how many commands ran. One that ends otherwise than the page says fails the test.
    """
    count = 0
    for block in blocks(page, title):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content)
        if not block.is_run:
            continue
        for line in block.commands:
            if line in ELSEWHERE.get(page.stem, {}):
                continue
            done = run_command(shrunk(line), folder, timeout_s)
            is_right = (
                block.is_expected(done.code) if line == block.commands[-1] else done.code == 0
            )
            assert is_right, (
                f"{page.name}: {shrunk(line)}\nended with {done.code}:\n{done.text[-3000:]}"
            )
            count += 1
    return count
