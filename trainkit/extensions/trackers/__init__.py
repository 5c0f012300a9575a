"""Loggers to services: MLflow, and a page of metrics that Prometheus reads (docs/logging.md)."""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.trackers"
_CLASSES = {
    "MLFlowLogger": f"{_HERE}.mlflow.MLFlowLogger",
    "PrometheusLogger": f"{_HERE}.prometheus.PrometheusLogger",
}

EXTENSION = Extension(
    name="trackers",
    summary="logger=mlflow, prometheus: values on an MLflow server, or for Prometheus to read",
    proven="each commit",
    targets=tuple(_CLASSES.values()),
    names={f"trainkit.loggers.{name}": place for name, place in _CLASSES.items()},
)
