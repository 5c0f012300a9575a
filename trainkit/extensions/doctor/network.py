"""Network: how this host is connected, and the environment variables of the frameworks."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.extension import Finding
from trainkit.launch.environment import read_launcher, without_launcher

AREA = "network"
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tun", "tap")
_PREFIXES = (
    "HOROVOD_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "TORCH_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
)
_SECRET = ("KEY", "SECRET", "TOKEN", "PASSWORD")


def look(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings, those on the user's environment included."""
    real = []
    for name in sorted(path.name for path in Path("/sys/class/net").iterdir()):
        virtual = name.startswith(_VIRTUAL)
        text = _interface(name)
        if not virtual and text != "down":
            real.append(name)
        yield Finding(AREA, name, f"{text}{' (virtual)' if virtual and name != 'lo' else ''}")
    if not real:
        yield Finding(AREA, "hosts", "this one alone", "ok")
    elif len(real) > 1:
        chosen = f"--network-interfaces {real[0]}"
        why = "On several hosts Horovod may choose an interface that the other hosts cannot reach."
        yield Finding(
            AREA,
            "several interfaces",
            ", ".join(real),
            "warning",
            why,
            f"horovodrun {chosen} ... (the fast one)",
        )
    yield _own_name()
    if shutil.which("ssh") is None:
        yield Finding(AREA, "ssh", "none", "ok", "", "horovodrun needs it for other hosts")
    yield from _environment(environ)


def _interface(name: str) -> str:
    place = Path("/sys/class/net") / name

    def read(file: str) -> str:
        try:
            return (place / file).read_text().strip()
        except OSError:  # the driver may not report a speed
            return ""

    state, speed = read("operstate"), read("speed")
    shown = {"unknown": "up"}.get(state, state)
    return f"{shown}, {int(speed) / 1000:g} Gbit/s" if speed.isdigit() and shown == "up" else shown


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        why = "This host cannot look up its own name; launchers and Gloo need that."
        return Finding(
            AREA,
            "own name",
            name,
            "warning",
            why,
            f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts",
        )
    return Finding(AREA, "own name", f"{name} is {address}")


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    shown = {
        k: "(hidden)" if any(s in k for s in _SECRET) else v
        for k, v in environ.items()
        if k.startswith(_PREFIXES)
    }
    yield Finding(
        AREA,
        "variables",
        ", ".join(f"{k}={v}" for k, v in sorted(shown.items())) or "none set for the frameworks",
    )
    started = read_launcher(environ)
    if started.world_size > 1:
        stray = " ".join(sorted(environ.keys() - without_launcher(environ).keys()))
        why = (
            f"trainkit takes this process for rank {started.rank} of {started.world_size}, started"
            f" by {started.name}."
        )
        yield Finding(AREA, "launcher's variables", stray, "warning", why, f"unset {stray}")
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        why = "Each kernel waits for the one before it: this is many times slower."
        yield Finding(
            AREA, "CUDA_LAUNCH_BLOCKING", "1", "warning", why, "unset CUDA_LAUNCH_BLOCKING"
        )
