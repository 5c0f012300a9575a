"""The server of `Forks` (forks.py): it imports what most programs of the tests do, and forks for
each request.

    python -m tests.helpers.fork_server LISTENER FOLDER

LISTENER is the descriptor of a socket; FOLDER/python is what the forks have for sys.executable. A
fork ends as Python does, with its exit handlers. The server ends with its stdin, and its forks with
it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

import recipes
import trainkit
from tests.helpers.forks import BIN, LAUNCHERS, READY, ROOT, USED
from tests.helpers.huge_pages import merge_pages
from trainkit.config import compose
from trainkit.config.choices import in_force, register
from trainkit.extensions import NAMES

_MODULES = (
    "hydra",
    "horovod.torch",
    "horovod.runner.launch",
    "plotly.graph_objects",
    "rich.progress",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "torchvision.transforms.v2",
    *(f"trainkit.extensions.{name}" for name in NAMES),
)
# What starts a word of a command -> what its forks import; the server does at the first such command.
_TRANSFORMERS = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
_LATER = dict.fromkeys(("conf=dpo", "conf=hf_", "conf=sft", "format=huggingface"), _TRANSFORMERS)
_LATER |= dict.fromkeys(("callbacks=lora", "format=peft"), ("peft",))
_MEASURED = ("faults/workers/job.py", "parallel/workers/audit.py", "parallel/workers/guards.py")
_LATER |= dict.fromkeys((str(ROOT / "tests" / name) for name in _MEASURED), ("torchmetrics",))
_LATER[str(ROOT / "tests/parallel/workers/split.py")] = ("pytorch_optimizer", "schedulefree")
_LATER[str(ROOT / "tests/parallel/workers/context.py")] = _TRANSFORMERS


def _serve(listener: socket.socket) -> None:
    """Fork for each request, until stdin ends;
    return in the fork, in the environment of its request.
    """
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    forks: dict[socket.socket, _Fork] = {}
    while True:
        for key, _ in waiting.select():
            if key.fileobj == 0:
                for fork in forks.values():
                    _kill(fork.pid)
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                _, fds, _, _ = socket.recv_fds(connection, 1, 4)
                if not fds:  # the program was killed before it asked
                    connection.close()
                    continue
                fork = _forked(connection, fds)
                if fork is None:
                    return
                forks[connection] = fork
                exit_of = os.pidfd_open(fork.pid)
                waiting.register(connection, selectors.EVENT_READ)
                waiting.register(exit_of, selectors.EVENT_READ, connection)
            elif key.data is None:
                # the program that stands for the fork is gone; the fork may have ended with it
                if key.fileobj in forks:
                    waiting.unregister(key.fileobj)
                    _kill(forks[key.fileobj].pid)  # type: ignore[index]
            else:
                _end_of(forks.pop(key.data), key.data)
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    waiting.unregister(key.data)
                key.data.close()


@dataclass(frozen=True)
class _Fork:
    """A fork that runs.

    Attributes:
        pid: its process id, and its session's.
        used: the file that its seconds of processors go to, or "".
    """

    pid: int
    used: str


def _end_of(fork: _Fork, connection: socket.socket) -> None:
    _, status, usage = os.wait4(fork.pid, 0)
    _kill(fork.pid)  # loader workers that outlived it
    if fork.used:
        with contextlib.suppress(OSError), Path(fork.used).open("a") as file:
            file.write(f"{usage.ru_utime + usage.ru_stime:.3f}\n")
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _kill(session: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(session, signal.SIGKILL)


def _forked(connection: socket.socket, fds: list[int]) -> _Fork | None:
    """Fork; return the child, or None in it, which is by then the program of the request."""
    request = _read(fds[0])
    _import_for(request["words"])
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):  # the program was killed meanwhile: _serve will notice
            connection.sendall(f"{pid}\n".encode())
        return _Fork(pid, request["env"].get(USED, ""))
    connection.close()
    _become(*fds)
    return None


def _import_for(words: list[str]) -> None:
    """Import what the forks of such commands need, once."""
    for start in [start for start in _LATER if any(word.startswith(start) for word in words)]:
        for name in _LATER.pop(start):
            with contextlib.suppress(ImportError):  # optional: the fork reports it
                importlib.import_module(name)
        gc.freeze()
        merge_pages()


def _read(request: int) -> Any:
    return json.loads(os.pread(request, os.fstat(request).st_size, 0))


_request: dict[str, Any] = {}


def _become(request_fd: int, *descriptors: int) -> None:
    """Be the process that the shell, or the launcher, would have started."""
    os.setsid()
    _request.update(_read(request_fd))
    os.close(request_fd)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(_request["umask"])
    os.sched_setaffinity(0, _request["affinity"])
    for limit, values in _request["limits"].items():
        resource.setrlimit(int(limit), values)
    os.chdir(_request["cwd"])
    os.environ.clear()
    os.environ.update(_request["env"])
    # that of the request, not the one that a module asked for when it was imported
    tempfile.tempdir = None
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, name in enumerate(("stdout", "stderr"), 1):
        raw = io.FileIO(number, "w", closefd=False)
        buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
        errors = "backslashreplace" if name == "stderr" else "strict"
        lines = number == 2 or os.isatty(number)
        text = io.TextIOWrapper(
            buffer, "utf-8", errors, line_buffering=lines, write_through=unbuffered
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _run() -> int:
    """Run the program; return its exit code."""
    words = _request["words"]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in paths if path] + _own_path
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.executable = _python
    try:
        if _request["name"] != "python":
            module, function = LAUNCHERS[_request["name"]].split(":")
            sys.argv = [str(BIN / _request["name"]), *words]
            return _code(getattr(importlib.import_module(module), function)())
        _forget(words[1] if words[0] == "-m" else "")
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.path.insert(0, _request["cwd"])
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            main.__file__ = words[0]
            main.__dict__["__builtins__"] = __builtins__
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)  # noqa: S102
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return _code(ended.code)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _forget(module: str) -> None:
    """Let a module that is run as `__main__` be imported once more by its name;
    a real start does not warn of that.
    """
    path = getattr(sys.modules.get(module), "__path__", None)
    sys.modules.pop(module if path is None else f"{module}.__main__", None)


def _core() -> list[str]:
    """Return all modules of the core and of the recipes: most programs import them as they go."""
    names = [
        module.name
        for package in (trainkit, recipes)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [name for name in names if not name.startswith("trainkit.extensions.")]


def _compose() -> None:
    """Compose a config, so that Hydra's plugins and the tables of its parsers, which it makes as it
    parses, are there for the forks; no config is left in force.
    """
    register()
    hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3")
    words = ["++conf=mlp", "trainer.max_epochs=2", "optimizer.lr=1e-3", "++data.urls='a,b'"]
    words += ["+callbacks.faults.faults=[{do: kill, rank: 1}]", "hydra.run.dir=."]
    with in_force({}):
        config = hydra.compose("mlp", words, return_hydra_config=True)
    assert config.run_dir.startswith("runs/mlp/")  # resolved, by the grammar of interpolations
    # the files that most commands read, the shipped ones and the sources of constructors; Hydra's
    # own parts on rank 0, and on the others
    for is_main in (True, False):
        compose.run("fit", ["conf=mlp"], is_main, lambda job: None)
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


def _code(code: object) -> int:
    return code if isinstance(code, int) else int(code is not None)


def _end(code: int) -> None:
    """End as Python does, with other threads and exit handlers,
    but without taking all modules apart.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _listener, _folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    _python = str(_folder / "python")
    for _name in (*_MODULES, *_core()):
        importlib.import_module(_name)
    _compose()
    _own_path = sys.path[
        1
        + len(os.environ.get("PYTHONPATH", "").split(os.pathsep))
        * bool(os.environ.get("PYTHONPATH")) :
    ]
    gc.freeze()  # what is imported is not looked at again in each fork
    merge_pages()
    (_folder / READY).touch()
    _serve(_listener)
    _listener.close()
    _end(_run())
