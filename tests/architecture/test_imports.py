"""What a user's imports load: a start does not wait for what the run may never use."""

from __future__ import annotations

import json
import subprocess
import sys

import trainkit

# Brought by some features, and slow; horovod and the loggers' services may not be there at all.
HEAVY = {
    "deepspeed",
    "google.protobuf",
    "horovod",
    "hydra",
    "IPython",
    "jinja2",
    "matplotlib",
    "mlflow",
    "omegaconf",
    "onnx",
    "pandas",
    "PIL",
    "ray",
    "plotly",
    "prometheus_client",
    "psutil",
    "pynvml",
    "scipy",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "torchvision",
    "triton",
    "wandb",
}


def loaded(line: str) -> set[str]:
    """Return the modules that a line brings, of a new Python that has torch already."""
    code = (
        f"import json, sys, torch; before = set(sys.modules); {line};"
        " print(json.dumps([*set(sys.modules) - before]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_names_a_user_needs_bring_nothing_heavy() -> None:
    """`from trainkit import Task, Trainer, ...` loads no module of HEAVY."""
    assert loaded("from trainkit import Callback, DataModule, Task, Trainer") & HEAVY == set()


def test_no_public_name_brings_anything_heavy() -> None:
    """No other public name does, save those for export and replay,
    which are commands of their own.
    """
    names = [name for name in trainkit.__all__ if name not in ("export", "replay")]
    assert len(names) > 30
    assert loaded(f"from trainkit import {', '.join(names)}") & HEAVY == set()


def test_a_heavy_module_is_seen() -> None:
    """The look at what is loaded sees what a line does bring."""
    assert {"plotly", "jinja2"} <= loaded("import plotly.io, jinja2") & HEAVY
