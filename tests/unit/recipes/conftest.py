"""Data of several recipes."""

from __future__ import annotations

import json

import pytest

from trainkit.extensions.language.token_writer import write_tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of tokens: bytes of many documents, most of them shorter than a row."""
    folder = tmp_path_factory.mktemp("tokens")
    lines = [{"text": f"{number} x" * (1 + number * number % 5)} for number in range(150)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(write_tokens(folder / "a.jsonl", folder / "tokens").root)
