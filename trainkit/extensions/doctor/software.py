"""Python, torch, torchvision, and the packages that trainkit needs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainkit.extension import Finding
from trainkit.version import __version__

AREA = "software"
PYTHONS = ((3, 10), (3, 14))
LEAST_TORCH = (2, 11)
_NEEDED = ("hydra-core", "omegaconf", "rich", "safetensors", "fsspec", "tensorboard", "plotly")
_EXTRAS = {
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
    "prometheus-client": "prometheus",
    "nvidia-ml-py": "prometheus",
    "ray": "ray",
}
# In a separate process: an import that crashes is a result too.
_ASK = """
import json, sys
answer = {}
try:
    import torch
    answer["torch"] = torch.__version__
    answer["cuda"] = torch.version.cuda
    answer["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    answer["names"] = [torch.cuda.get_device_name(i) for i in range(answer["gpus"])]
    answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if answer["gpus"] else None
    answer["threads"] = torch.get_num_threads()
except Exception as error:
    answer["torch_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer), flush=True)
try:
    import torchvision
    torchvision.ops.nms
    answer["torchvision"] = torchvision.__version__
except Exception as error:
    answer["torchvision_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class TorchSeen:
    """torch as seen by a new Python process; None: not installed."""

    torch: str | None = None  # its version
    cuda: str | None = None  # the CUDA version it was built for
    gpus: int = 0  # the number of GPUs that it sees
    names: list[str] = field(default_factory=list)  # their names
    nccl: str | None = None  # NCCL's version
    torchvision: str | None = None  # torchvision's version
    errors: dict[str, str] = field(default_factory=dict)  # failed imports: package -> error


@functools.cache
def ask_torch() -> TorchSeen:
    """Import torch in a new Python process; takes some seconds, once."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said = done.stderr.strip()[-300:] or f"the import ended Python with exit code {done.returncode}"
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {"torch_error": said}
    if len(lines) == 1:
        answer["torchvision_error"] = f"the import ended Python with exit code {done.returncode}"
    errors = {
        name: answer[f"{name}_error"]
        for name in ("torch", "torchvision")
        if f"{name}_error" in answer
    }
    known = {
        name: answer[name]
        for name in ("torch", "cuda", "gpus", "names", "nccl", "torchvision")
        if name in answer
    }
    return TorchSeen(**known, errors=errors)


def look(torch: TorchSeen) -> Iterator[Finding]:
    """Yield the findings."""
    yield Finding(AREA, "trainkit", __version__)
    yield _python(sys.version_info[:2])
    yield _torch(torch)
    yield _torchvision(torch)
    missing = [name for name in _NEEDED if not _has(name)]
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        yield Finding(
            AREA,
            "packages",
            f"missing: {', '.join(missing)}",
            "wrong",
            "trainkit needs them.",
            remedy,
        )
    there = [name for name in _EXTRAS if _has(name)]
    absent = sorted({extra for name, extra in _EXTRAS.items() if name not in there})
    more = (
        f"; not installed: {', '.join(absent)} (pip install 'trainkit[{','.join(absent)}]')"
        if absent
        else ""
    )
    yield Finding(AREA, "extras", f"{', '.join(there) or 'none'}{more}")


def _python(version: tuple[int, ...]) -> Finding:
    shown = platform.python_version()
    least, most = PYTHONS
    if version < least:
        why = f"trainkit needs Python {least[0]}.{least[1]} or newer."
        return Finding(
            AREA, "Python", shown, "wrong", why, "Create an environment with a newer Python."
        )
    if version > most:
        why = f"trainkit is tested with Python {least[0]}.{least[1]} to {most[0]}.{most[1]}."
        return Finding(
            AREA,
            "Python",
            shown,
            "warning",
            why,
            f"If something fails, use Python {most[0]}.{most[1]}.",
        )
    return Finding(AREA, "Python", shown)


def _torch(torch: TorchSeen) -> Finding:
    if torch.torch is None:
        why = f"It cannot be imported: {torch.errors.get('torch', 'it is not installed')}."
        return Finding(AREA, "torch", "none", "wrong", why, _install())
    built = f" for CUDA {torch.cuda}" if torch.cuda else ", without CUDA"
    number = tuple(int(part) for part in re.findall(r"\d+", torch.torch)[:2])
    if number < LEAST_TORCH:
        why = f"trainkit needs torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer."
        return Finding(
            AREA, "torch", torch.torch, "wrong", why, "pip install --upgrade torch torchvision"
        )
    return Finding(AREA, "torch", f"{torch.torch}{built}")


def _torchvision(torch: TorchSeen) -> Finding:
    if torch.torchvision is not None:
        return Finding(AREA, "torchvision", torch.torchvision)
    if torch.torch is None:
        return Finding(AREA, "torchvision", "cannot be checked without torch")
    said = torch.errors.get("torchvision", "it is not installed")
    why = (
        f"It cannot be imported ({said}): it was built for another torch, or is not installed. The"
        " image recipes need it."
    )
    return Finding(
        AREA, "torchvision", "none", "wrong", why, f"{_install()}   (together: a matched pair)"
    )


def _install() -> str:
    """Return the install command; pip would leave a broken installation unchanged."""
    there = _has("torch") or _has("torchvision")
    return f"pip install {'--upgrade --force-reinstall ' * there}torch torchvision"


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
