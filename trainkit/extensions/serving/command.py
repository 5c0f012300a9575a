"""serve: answers HTTP requests with a run's model or an exported file."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from trainkit.cli.guard import main_alone
from trainkit.cli.options import count, read_keys, trusted_modules
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError
from trainkit.extensions.serving.usage import USAGE

_KEYS = USAGE.keys()
_BACKENDS = ("auto", "ray", "local")
_APIS = ("predict", "openai")
_NUMBERS = ("batch_wait_ms", "max_body_mb", "client_timeout_s")
_NEEDED = ("starlette", "uvicorn", "PIL")


def main(command: str, arguments: Sequence[str]) -> int:
    """Serve RUN_DIR or an export: [port=8000] [key=value ...]; return the exit code."""
    return main_alone(arguments or ["--help"], help_text(command, USAGE), lambda: _work(arguments))


def _work(arguments: Sequence[str]) -> None:
    """Serve. torch is imported here, after all checks."""
    if "=" in arguments[0]:
        raise ConfigError(
            f"The run's folder, or the exported file, comes first, before {arguments[0]}: serve"
            " RUN_DIR port=8000."
        )
    given = read_keys(arguments[1:], _KEYS, "serve")
    backend = given.get("backend", "auto")
    if backend not in _BACKENDS:
        raise ConfigError(f"backend is '{backend}'; it must be one of {', '.join(_BACKENDS)}.")
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"serve needs {', '.join(absent)}, not installed here. Install: pip install"
            " 'trainkit[serve]'"
        )
    port = count("port", given.get("port", "8000"))
    replicas = count("replicas", given.get("replicas", "1"))
    if port > 65535:
        raise ConfigError(f"port is {port}; it must be 65535 or less.")
    numbers = {key: _number(key, given[key]) for key in _NUMBERS if key in given}
    if numbers.get("client_timeout_s") == 0:
        raise ConfigError(
            "client_timeout_s is 0; it must be more: a request takes its time to arrive."
        )
    counts = {
        key: count(key, given[key]) for key in ("max_batch_size", "max_waiting") if key in given
    }
    cpus = _number("cpus", given.get("cpus", "1"))
    most = _of_texts(given)
    serving: Any = importlib.import_module("trainkit.extensions.serving.serve")
    app: Any = importlib.import_module("trainkit.extensions.serving.app")
    if most is not None:
        text_model: Any = importlib.import_module("trainkit.extensions.serving.text_model")
        model = text_model.open_text_model(
            arguments[0], given.get("tokenizer"), trusted_modules(given)
        )
        where = serving.Where("local", given.get("host", "127.0.0.1"), port)
        serving.serve_texts(model, most, app.ServiceOptions(**counts, **numbers), where)
        return
    path = serving.find_export(arguments[0], trusted_modules(given))
    where = serving.Where(backend, given.get("host", "127.0.0.1"), port, replicas, cpus)
    serving.serve(path, app.ServiceOptions(**counts, **numbers), where)


def _of_texts(given: dict[str, str]) -> int | None:
    """Return the tokens of an answer at most, for api=openai; None for predictions.

    Raises:
        ConfigError: a setting has no effect with this api.
    """
    api = given.get("api", "predict")
    if api not in _APIS:
        raise ConfigError(f"api is '{api}'; it must be one of {', '.join(_APIS)}.")
    if api == "predict":
        for key in ("max_new_tokens", "tokenizer"):
            if key in given:
                raise ConfigError(
                    f"{key} is {given[key]}, which has no effect without api=openai. Set that, or"
                    f" leave {key} out."
                )
        return None
    if given.get("backend") == "ray":
        raise ConfigError("backend is ray; api=openai answers in one process. Leave it out.")
    for key in ("replicas", "cpus"):
        if key in given:
            raise ConfigError(
                f"{key} is {given[key]}; api=openai answers in one process, without Ray. Leave it"
                " out."
            )
    return count("max_new_tokens", given.get("max_new_tokens", "1024"))


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{key} is '{text}'; it must be a number, 0 or more.")
    return value
