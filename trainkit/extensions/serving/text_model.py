"""The language model to serve: of a run, or of a folder of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.exporting.from_run import load_task
from trainkit.extensions.exporting.places import default_checkpoint, has_checkpoints
from trainkit.extensions.language.sources import ModelSource, TransformersSource, load_tokenizer
from trainkit.extensions.language.tokenizer_folder import own_tokenizer


class TextModel(NamedTuple):
    """A model, its name in requests, and a line about it."""

    source: ModelSource
    name: str
    line: str


def open_text_model(given: str, tokenizer: str | None, trust: list[str]) -> TextModel:
    """Return the model of a run's best or last checkpoint, or of a folder of `save_pretrained`.

    Raises:
        ConfigError: it is neither, or has no tokenizer.
        TaskError: the run's Task makes no text.
    """
    path = Path(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = path.resolve().name
    if has_checkpoints(path):
        task, line = load_task(default_checkpoint(given), given, trust)
        make: Any = getattr(task, "text_source", None)
        if not callable(make):
            raise TaskError(
                f"{type(task).__name__} has no text_source(), so api=openai cannot serve it. Give"
                " it a method text_source(tokenizer), as recipes.language_model.LanguageModel has;"
                " or leave api out, to serve its predictions."
            )
        task.to(device)
        return TextModel(make(tokenizer or own_tokenizer(path)), name, line)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{given} is neither a run (it has no checkpoints/) nor a folder of transformers (it"
            " has no config.json). Give one of them: serve runs/chat api=openai."
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{given} needs transformers: pip install 'trainkit[transformers]'"
        ) from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype="auto"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given} has no causal model that can be loaded: {error}") from error
    source = TransformersSource(model.eval().to(device), load_tokenizer(tokenizer or str(path)))
    return TextModel(source, name, f"model       {path}, {type(model).__name__}")
