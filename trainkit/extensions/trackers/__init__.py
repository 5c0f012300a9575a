"""Loggers to services: MLflow, Weights & Biases, and a page of metrics that Prometheus reads
(docs/logging.md).
"""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.trackers"
_CLASSES = {
    "MLFlowLogger": f"{_HERE}.mlflow.MLFlowLogger",
    "PrometheusLogger": f"{_HERE}.prometheus.PrometheusLogger",
    "WandbLogger": f"{_HERE}.wandb.WandbLogger",
}

EXTENSION = Extension(
    name="trackers",
    summary="logger=wandb, mlflow, prometheus: values at W&B, on an MLflow server, for Prometheus",
    proven="each commit",
    targets=tuple(_CLASSES.values()),
    names={f"trainkit.loggers.{name}": place for name, place in _CLASSES.items()},
)
