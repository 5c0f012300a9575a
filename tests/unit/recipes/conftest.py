"""Data of several recipes."""

from __future__ import annotations

import importlib
import json

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of tokens: bytes of many documents, most of them shorter than a row."""
    folder = tmp_path_factory.mktemp("tokens")
    lines = [{"text": f"{number} x" * (1 + number * number % 5)} for number in range(150)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # here: the process that distributes tests reads this file, and needs no torch
    write_tokens = importlib.import_module("trainkit.extensions.language.token_writer").write_tokens
    return str(write_tokens(folder / "a.jsonl", folder / "tokens").root)
