"""generate: continues texts, or answers messages, with the model of a run, from its own config and
best checkpoint.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.guard import main_alone
from trainkit.cli.options import count, read_keys, trusted_modules
from trainkit.cli.usage import help_text
from trainkit.console import plural
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.exporting.places import default_checkpoint, has_checkpoints
from trainkit.extensions.language.tokenizer_folder import own_tokenizer
from trainkit.extensions.language.usage import GENERATE

_KEYS = GENERATE.keys()
_OPTIONAL = ("tokenizer", "system", "top_p")  # a Task's generate() may lack them
_AT_ONCE = 16  # prompts that are answered together


def main(command: str, arguments: Sequence[str]) -> int:
    """Generate text: RUN_DIR prompt="..." [key=value ...]; return the exit code."""
    return main_alone(
        arguments or ["--help"],
        help_text(command, GENERATE),
        lambda: _work(arguments),
        only_prints=True,
    )


def _work(arguments: Sequence[str]) -> None:
    """Generate. torch is imported here, after all checks."""
    run_dir, request = _read(arguments)
    ckpt_path, trust = request.pop("ckpt_path"), request.pop("trust")
    prompts, at_once = request.pop("prompts"), request.pop("batch_size")
    from_run: Any = importlib.import_module("trainkit.extensions.exporting.from_run")
    task, line = from_run.load_task(ckpt_path, run_dir, trust)
    generate = getattr(task, "generate", None)
    if not callable(generate):
        raise TaskError(
            f"{type(task).__name__} has no generate(), so it makes no text. Give it a method"
            " generate(prompt, max_new_tokens, temperature, top_k, seed) that yields text, as"
            " recipes.language_model.LanguageModel has."
        )
    request |= _optional(generate, request, run_dir)
    torch: Any = importlib.import_module("torch")
    task.to("cuda" if torch.cuda.is_available() else "cpu")
    print(line, flush=True)
    began = time.monotonic()
    if len(prompts) == 1:
        num_made = _show(prompts[0], generate(prompts[0], **request))
    else:
        num_made = _answer_all(task, prompts, request, at_once)
    rate = num_made / max(1e-9, time.monotonic() - began)
    of = "" if len(prompts) == 1 else f"{len(prompts)} prompts, "
    print(f"\n{of}{plural(num_made, 'token')}, {rate:,.0f} tokens/s", flush=True)


def _show(prompt: str, pieces: Iterable[str]) -> int:
    """Print a prompt and what follows it, as it comes; return how many pieces came."""
    print(f"\n{prompt}", end="", flush=True)
    num_made = 0
    for piece in pieces:
        print(piece, end="", flush=True)
        num_made += 1
    print(flush=True)
    return num_made


def _answer_all(
    task: Any, prompts: Sequence[str], request: dict[str, Any], at_once: int | None
) -> int:
    """Print the prompts with their answers, in order; return the number of tokens."""
    if not callable(getattr(task, "text_source", None)):
        if at_once is not None:
            raise TaskError(
                f"batch_size is {at_once}, but {type(task).__name__} has no text_source(), so its"
                " prompts are answered one by one. Leave it out."
            )
        return sum(_show(one, task.generate(one, **request)) for one in prompts)
    sampling: Any = importlib.import_module("trainkit.extensions.language.sampling")
    draws = dict(request)
    num_made = 0
    source = task.text_source(draws.pop("tokenizer", None))
    system = draws.pop("system", None)
    answers = []
    for number, prompt in enumerate(prompts, start=1):
        ask = sampling.Ask(sampling.asked(source, prompt, system), **draws)
        try:
            answers.append(sampling.begin(source, ask))
        except ConfigError as error:
            raise ConfigError(f"Prompt {number} of the file: {error}") from error
    size = at_once or _AT_ONCE
    for first in range(0, len(answers), size):
        batch = answers[first : first + size]
        texts = dict.fromkeys(map(id, batch), "")
        for one, piece in sampling.continue_all(source, batch):
            texts[id(one)] += piece
        for one, prompt in zip(batch, prompts[first:], strict=False):
            _show(prompt, [texts[id(one)]])
            num_made += one.num_made
    return num_made


def _optional(generate: Any, request: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Return the arguments that a generate() may lack, taken out of the request.

    Raises:
        TaskError: one is given that it lacks.
    """
    taken = inspect.signature(generate).parameters
    given = {name: request.pop(name) for name in _OPTIONAL}
    for name, value in given.items():
        if value is not None and name not in taken:
            raise TaskError(
                f"{name} is '{value}', but this Task's generate() takes none. Leave it out."
            )
    given["tokenizer"] = given["tokenizer"] or own_tokenizer(Path(run_dir))
    return {name: value for name, value in given.items() if name in taken}


def _read(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the run's folder and the settings, checked without torch."""
    if "=" in arguments[0]:
        raise ConfigError(
            f"The run's folder comes first, before {arguments[0]}: generate RUN_DIR prompt=..."
        )
    run_dir = arguments[0]
    given = read_keys(arguments[1:], _KEYS, "generate")
    prompts = _prompts(given)
    if not has_checkpoints(run_dir):
        raise ConfigError(
            f"{run_dir} is no run with checkpoints. Give a run's folder, for example"
            " runs/gpt/<time>."
        )
    temperature = _number(given.get("temperature", "0.8"))
    if not 0 <= temperature < float("inf"):
        raise ConfigError(
            f"temperature is '{given['temperature']}'; it must be a number, 0 or more."
        )
    top_p = _number(given["top_p"]) if "top_p" in given else None
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p is '{given['top_p']}'; it must be above 0, and 1 or less.")
    if "tokenizer" in given and not Path(given["tokenizer"]).exists():
        raise ConfigError(
            f"tokenizer is '{given['tokenizer']}', and there is no such file. Give a"
            " tokenizer.json; for a model of transformers, the folder of its tokenizer."
        )
    return run_dir, {
        "tokenizer": given.get("tokenizer"),
        "system": given.get("system"),
        "top_p": top_p,
        "prompts": prompts,
        "batch_size": count("batch_size", given["batch_size"]) if "batch_size" in given else None,
        "max_new_tokens": count("max_new_tokens", given.get("max_new_tokens", "256")),
        "temperature": temperature,
        "top_k": count("top_k", given["top_k"]) if "top_k" in given else None,
        "seed": count("seed", given.get("seed", "0"), least=0),
        "ckpt_path": given.get("ckpt_path", default_checkpoint(run_dir)),
        "trust": trusted_modules(given),
    }


def _prompts(given: dict[str, str]) -> list[str]:
    """Return what is to be continued: one text, or the lines of a file."""
    if "prompt" in given and "prompts" in given:
        raise ConfigError("prompt and prompts are both given. Leave one out.")
    if "prompt" in given:
        if "batch_size" in given:
            raise ConfigError(
                f"batch_size is {given['batch_size']}, but there is one prompt. Leave it out, or"
                " give a file of prompts: prompts=FILE."
            )
        return [given["prompt"]]
    if "prompts" not in given:
        raise ConfigError(
            "prompt is missing; give the text to continue: prompt='Once upon a time'; or a file"
            " with one in each line: prompts=FILE."
        )
    try:
        lines = Path(given["prompts"]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts is '{given['prompts']}', which cannot be read as text: {error}. Give a file"
            " with a prompt in each line."
        ) from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(
            f"prompts is '{given['prompts']}', which has no prompt. Write one in each line."
        )
    return prompts


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
