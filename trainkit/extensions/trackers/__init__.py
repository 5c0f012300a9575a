"""Loggers to services: MLflow, Weights & Biases, and a page of metrics that Prometheus reads; and to
lines of JSON (docs/logging.md).
"""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.trackers"
_CLASSES = {
    "JSONLLogger": f"{_HERE}.jsonl.JSONLLogger",
    "MLFlowLogger": f"{_HERE}.mlflow.MLFlowLogger",
    "PrometheusLogger": f"{_HERE}.prometheus.PrometheusLogger",
    "WandbLogger": f"{_HERE}.wandb.WandbLogger",
}

EXTENSION = Extension(
    name="trackers",
    summary=(
        "logger=wandb, mlflow, prometheus, jsonl: values at W&B, on an MLflow server, for Prometheus,"
        " in lines of JSON"
    ),
    proven="each commit",
    targets=tuple(_CLASSES.values()),
    names={f"trainkit.loggers.{name}": place for name, place in _CLASSES.items()}
    | {"trainkit.loggers.jsonl.JSONLLogger": _CLASSES["JSONLLogger"]},
)
