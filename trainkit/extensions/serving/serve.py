"""Serves an export over HTTP: on Ray Serve with replicas, or by uvicorn in this process; and texts
of a language model, in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette

from trainkit.collector import collect_as_usual
from trainkit.errors import ConfigError
from trainkit.extensions.exporting.from_run import export_run
from trainkit.extensions.exporting.places import (
    default_checkpoint,
    has_checkpoints,
    places_of_checkpoints,
)
from trainkit.extensions.ray.connection import connect_ray
from trainkit.extensions.ray.free import ranks_in
from trainkit.extensions.serving.app import Service, ServiceOptions
from trainkit.extensions.serving.openai_app import TextService
from trainkit.extensions.serving.slow_clients import punctual
from trainkit.extensions.serving.text_model import TextModel

_NAME = "trainkit"


@dataclass(frozen=True)
class Where:
    """Where a service runs.

    Attributes:
        backend: "ray", "local", or "auto": ray if it is installed.
        host: the address to listen at.
        port: its port.
        replicas: processes that answer, on Ray.
        cpus: of each, on Ray.
    """

    backend: Literal["auto", "ray", "local"] = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    cpus: float = 1.0


def find_export(given: str, trust: list[str]) -> Path:
    """Return the file to serve: the given one, or of a run's folder its newest .pt2, which is
    exported first if there is none.

    Raises:
        ConfigError: it is neither a run nor an export.
    """
    path = Path(given)
    if path.is_file():
        return path
    if not has_checkpoints(path) and not (path / "export").is_dir():
        what = (
            "does not exist"
            if not path.exists()
            else "is no run (it has no checkpoints/) and no exported file"
        )
        raise ConfigError(
            f"{given} {what}. Give a run's folder, as runs/mlp/<time>, or a .pt2 or .onnx file."
        )
    files = sorted((path / "export").glob("*.pt2"), key=lambda file: file.stat().st_mtime)
    if not files:
        print(f"{given} has no export yet:", flush=True)
        export_run(default_checkpoint(given), given, "torch_export", None, trust)
        files = sorted((path / "export").glob("*.pt2"))
    _say_if_older(files[-1], path)
    return files[-1]


def _say_if_older(file: Path, run_dir: Path) -> None:
    """Print a line if the run has trained on since its export."""
    places = places_of_checkpoints(run_dir)
    links = [Path(place, name) for name in ("best", "last") for place in places]
    saved = next((link for link in links if link.exists()), links[0])
    manifest = saved / "manifest.json"
    if manifest.is_file() and manifest.stat().st_mtime > file.stat().st_mtime:
        print(
            f"older    {file} was written before {saved.parent.name}/{saved.name} ({saved.resolve().name});"
            f" to serve that: python -m trainkit export ckpt_path={saved.name} run_dir={run_dir}"
            " format=torch_export",
            flush=True,
        )


def serve(path: Path, options: ServiceOptions, where: Where) -> None:
    """Answer requests until a signal comes.

    Raises:
        ConfigError: the file cannot be served, the port is taken, or what is needed is not
            installed.
    """
    service = Service(path, options)  # before anything listens: its errors are the user's to read
    has_ray = importlib.util.find_spec("ray") is not None
    if where.backend == "ray" and not has_ray:
        raise ConfigError(
            "backend=ray, but Ray is not installed. Install: pip install 'trainkit[ray]'; or use"
            " backend=local."
        )
    _check_port(where)
    if where.backend == "ray" or (where.backend == "auto" and has_ray):
        _on_ray(path, options, where)
        return
    for name, value in (("replicas", where.replicas), ("cpus", where.cpus)):
        if value != 1:
            how = "use backend=ray" if has_ray else "install Ray: pip install 'trainkit[ray]'"
            raise ConfigError(
                f"{name} is {value:g}, and one process answers without Ray. Leave it out, or {how}."
            )
    _announce(path, where, "one process")
    _run_here(service.app(), options, where)


def serve_texts(
    model: TextModel, max_new_tokens: int, options: ServiceOptions, where: Where
) -> None:
    """Answer requests in OpenAI's format, in this process, until a signal comes.

    Raises:
        ConfigError: the port is taken.
    """
    _check_port(where)
    service = TextService(model.source, model.name, max_new_tokens, options)
    print(
        f"{model.line}\nserving     model={model.name} in one process\nurl        "
        f" http://{where.host}:{where.port}/v1",
        flush=True,
    )
    _run_here(service.app(), options, where)


def _run_here(app: Starlette, options: ServiceOptions, where: Where) -> None:
    collect_as_usual()
    uvicorn = importlib.import_module("uvicorn")
    http = punctual(
        importlib.import_module("uvicorn.protocols.http.auto").AutoHTTPProtocol,
        options.client_timeout_s,
    )
    uvicorn.run(
        app,
        host=where.host,
        port=where.port,
        http=http,
        log_level="warning",
        access_log=False,
    )


class _Replica:
    """What Ray asks a replica, beside requests."""

    app: Starlette  # Ray's wrapper has it

    def check_health(self) -> None:
        """Raise after the device has failed: Ray puts another replica in its place."""
        fault = self.app.state.service.model.fault
        if fault:
            raise RuntimeError(fault)


def deployment(path: Path, options: ServiceOptions, where: Where) -> Any:
    """Return the application for `ray.serve.run`: replicas, each with the app of `Service`."""
    ray_serve = importlib.import_module("ray.serve")

    def build() -> Any:
        return Service(path, options).app()

    ingress = ray_serve.ingress(build)(_Replica)
    made = ray_serve.deployment(
        ingress,
        name=_NAME,
        num_replicas=where.replicas,
        max_ongoing_requests=options.max_waiting,
        # without it Ray lets any number wait in front of the replicas
        max_queued_requests=options.max_waiting,
        ray_actor_options={"num_cpus": where.cpus},
    )
    return made.bind()


def refuse_running(applications: Collection[str], proxies: Collection[str]) -> None:
    """Refuse a cluster on which Ray Serve runs: it has one HTTP port, which stays as it is, and one
    application at the route of this one, which would end.

    Raises:
        ConfigError: it runs.
    """
    if applications or proxies:
        names = ", ".join(sorted(applications)) or "none"
        raise ConfigError(
            f"backend=ray: Ray Serve runs on this cluster already (applications: {names}), with its"
            " own port, and a route that serve would take from them. Use backend=local, or unset"
            " RAY_ADDRESS to serve on a cluster of this machine's own; `serve shutdown` ends what"
            " runs there."
        )


def check_room(nodes: Sequence[Mapping[str, float]], where: Where) -> None:
    """Refuse replicas for which a cluster of this host has no room; of one that may grow,
    print a line.

    Raises:
        ConfigError: there is no room.
    """
    room = where.replicas if where.cpus == 0 else ranks_in(nodes, {"CPU": where.cpus})
    if room >= where.replicas:
        return
    text = (
        f"replicas is {where.replicas}, each with cpus={where.cpus:g}, and the cluster has room"
        f" for {room}"
    )
    if not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(f"{text}. Give fewer, or smaller cpus: cpus=0.5 puts two on a core.")
    print(f"waiting  {text}, until nodes come", flush=True)


def _on_ray(path: Path, options: ServiceOptions, where: Where) -> None:
    ray = connect_ray("backend=ray")
    ray_serve = importlib.import_module("ray.serve")
    status = ray_serve.status()
    refuse_running(status.applications, status.proxies)
    check_room([node["Resources"] for node in ray.nodes() if node["Alive"]], where)
    ended = threading.Event()
    before = [
        (number, signal.signal(number, _setter(ended)))
        for number in (signal.SIGTERM, signal.SIGINT)
    ]
    try:
        ray_serve.start(http_options={"host": where.host, "port": where.port})
        ray_serve.run(deployment(path.absolute(), options, where), name=_NAME, route_prefix="/")
        _announce(path, where, f"Ray Serve, {where.replicas} replica{'s' * (where.replicas > 1)}")
        ended.wait()
    finally:
        end(ray_serve)
        for number, handler in before:
            signal.signal(number, handler)


def end(ray_serve: Any) -> None:
    """End the service; Ray Serve with it, unless others have put applications there."""
    others = sorted(set(ray_serve.status().applications) - {_NAME})
    if not others:
        ray_serve.shutdown()
        return
    ray_serve.delete(_NAME)
    print(f"ended    Ray Serve stays, with other applications: {', '.join(others)}", flush=True)


def _setter(ended: threading.Event) -> Callable[..., None]:
    return lambda *_: ended.set()


def _announce(path: Path, where: Where, how: str) -> None:
    print(
        f"serving  {path} on {how}\nurl      http://{where.host}:{where.port}/predict", flush=True
    )


def _check_port(where: Where) -> None:
    try:
        with socket.create_server((where.host, where.port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"host={where.host} port={where.port} cannot be used: {error.strerror}. Choose another"
            " port."
        ) from error
