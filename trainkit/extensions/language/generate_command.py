"""generate: continues a text, or answers a message, with the model of a run, from its own config
and best checkpoint.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.guard import main_alone
from trainkit.cli.options import count, module_names, read_keys
from trainkit.cli.usage import help_text
from trainkit.console import plural
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.language.usage import GENERATE

_KEYS = GENERATE.keys()
_OPTIONAL = ("tokenizer", "system", "top_p")  # a Task's generate() may lack them


def main(command: str, arguments: Sequence[str]) -> int:
    """Generate text: RUN_DIR prompt="..." [key=value ...]; return the exit code."""
    return main_alone(
        arguments or ["--help"], help_text(command, GENERATE), lambda: _work(arguments)
    )


def _work(arguments: Sequence[str]) -> None:
    """Generate. torch is imported here, after all checks."""
    run_dir, request = _read(arguments)
    ckpt_path, trust = request.pop("ckpt_path"), request.pop("trust")
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
    print(f"{line}\n\n{request['prompt']}", end="", flush=True)
    began = time.monotonic()
    count_made = 0
    for piece in generate(**request):
        print(piece, end="", flush=True)
        count_made += 1
    rate = count_made / max(1e-9, time.monotonic() - began)
    print(f"\n\n{plural(count_made, 'token')}, {rate:,.0f} tokens/s", flush=True)


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
    given["tokenizer"] = given["tokenizer"] or _own_tokenizer(Path(run_dir))
    return {name: value for name, value in given.items() if name in taken}


def _own_tokenizer(run_dir: Path) -> str | None:
    """Return the run's copy of its data's tokenizer, or the one of the model that it has left."""
    if (run_dir / "tokenizer.json").is_file():
        return str(run_dir / "tokenizer.json")
    if (run_dir / "pretrained" / "tokenizer_config.json").is_file():
        return str(run_dir / "pretrained")
    return None


def _read(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the run's folder and the settings, checked without torch."""
    if "=" in arguments[0]:
        raise ConfigError(
            f"The run's folder comes first, before {arguments[0]}: generate RUN_DIR prompt=..."
        )
    run_dir, given = arguments[0], read_keys(arguments[1:], _KEYS, "generate")
    if "prompt" not in given:
        raise ConfigError(
            "prompt is missing; give the text to continue: prompt='Once upon a time'."
        )
    if not (Path(run_dir) / "checkpoints").is_dir():
        raise ConfigError(
            f"{run_dir} is no run with checkpoints. Give a run's folder, for example"
            " runs/gpt/<time>."
        )
    best = next(
        (name for name in ("best", "last") if (Path(run_dir) / "checkpoints" / name).exists()),
        "best",
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
        "prompt": given["prompt"],
        "max_new_tokens": count("max_new_tokens", given.get("max_new_tokens", "256")),
        "temperature": temperature,
        "top_k": count("top_k", given["top_k"]) if "top_k" in given else None,
        "seed": count("seed", given.get("seed", "0"), least=0),
        "ckpt_path": given.get("ckpt_path", best),
        "trust": module_names(given.get("trust", "")),
    }


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
