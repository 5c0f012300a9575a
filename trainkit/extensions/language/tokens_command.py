"""data tokens: text files to a folder of numbers, which language models train on."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.guard import fail, guarded
from trainkit.cli.options import read_keys
from trainkit.cli.usage import help_text
from trainkit.config.resources import make_importable
from trainkit.console import console_of, short
from trainkit.errors import ConfigError
from trainkit.extensions.language.usage import TOKENS
from trainkit.launch.environment import read_launcher

_KEYS = TOKENS.keys()
_REFRESH_RATE = 4.0


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `data tokens TEXTS output=FOLDER [key=value ...]`; return the exit code."""
    launcher = read_launcher()
    if "-h" in arguments or "--help" in arguments:
        print(help_text(command, TOKENS))
        return 0
    try:
        request = _read(command, arguments)
    except ConfigError as error:
        return fail(error, launcher, str(error), error.exit_code)
    make_importable()
    return guarded(lambda: _work(**request), launcher)


def _read(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `write_tokens`, checked without torch."""
    if not arguments or arguments[0].partition("=")[0] in _KEYS:
        raise ConfigError(
            f"The texts are missing: a .txt, a .jsonl or a folder of them: {command} TEXTS"
            " output=FOLDER"
        )
    given = read_keys(arguments[1:], _KEYS, command)
    if "output" not in given:
        raise ConfigError(
            "output is missing; it must be the folder to write, which does not exist yet."
        )
    try:
        val = float(given.get("val", "0.1"))
    except ValueError:
        val = 0.0
    if not 0 < val < 1:
        raise ConfigError(
            f"val is '{given['val']}'; it must be a number between 0 and 1: the share of the tokens"
            " to hold out."
        )
    if "tokenizer" in given and not Path(given["tokenizer"]).is_file():
        raise ConfigError(
            f"tokenizer is '{given['tokenizer']}', and there is no such file. Give a"
            " tokenizer.json."
        )
    if "end_of_text" in given and "tokenizer" not in given:
        raise ConfigError(
            f"end_of_text is '{given['end_of_text']}', but bytes have no such token. Give a"
            " tokenizer, or leave it out."
        )
    paths = {"source": Path(arguments[0]), "output": Path(given["output"])}
    tokenizer = Path(given["tokenizer"]) if "tokenizer" in given else None
    return {**paths, "tokenizer": tokenizer, "val": val, "end_of_text": given.get("end_of_text")}


def _work(source: Path, output: Path, **options: Any) -> None:
    """Write the folder, with a progress bar. torch is imported here, after all checks."""
    writer: Any = importlib.import_module("trainkit.extensions.language.token_writer")
    progress: Any = importlib.import_module("trainkit.callbacks.progress.progress")
    screen = progress.make_screen(console_of(), _REFRESH_RATE)
    began = time.monotonic()

    def moved(num_bytes: int, num_tokens: int) -> None:
        rate = num_bytes / 2**20 / max(1e-9, time.monotonic() - began)
        screen.moved(num_bytes >> 20, f"{rate:,.1f} MiB/s", [f"{num_tokens:,} tokens"])

    try:
        screen.begin("MiB", sum(file.stat().st_size for file in writer.files_of(source)) >> 20)
        folder = writer.write_tokens(source, output, moved=moved, **options)
        screen.end()
    finally:
        screen.close()
    print(
        f"wrote    {short(output.absolute())}: {len(folder.train):,} tokens to train on,"
        f" {len(folder.val):,} held out"
    )
    print(
        f"train    python -m trainkit fit conf=gpt_124m data.root={output}"
        f" data.vocab_size={folder.vocab_size}",
        flush=True,
    )
