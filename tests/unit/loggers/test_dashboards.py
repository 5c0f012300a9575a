"""The dashboard and the alerts query exactly the exported series."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trainkit
from tests.helpers.prometheus_scrape import exported
from trainkit.extensions.insight.device_stats import DeviceStats
from trainkit.extensions.trackers import prometheus
from trainkit.extensions.trackers.series import SERIES

FOLDER = Path(trainkit.__file__).parent / "loggers" / "dashboards"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = [target["expr"] for _, target in TARGETS] + [rule["expr"] for rule in RULES]
VARIABLES = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]


def names_in(expr: str) -> set[str]:
    """Return the series that an expression names."""
    return set(re.findall(r"\btrainkit_\w+", expr))


def labels_in(expr: str) -> set[str]:
    """Return the labels that an expression names: in braces, and after by, on and without."""
    braces = [
        label
        for inner in re.findall(r"\{(.*?)\}", expr)
        for label in re.findall(r"(\w+)\s*[=!]~?", inner)
    ]
    lists = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expr)
    return {*braces, *(label.strip() for inner in lists for label in inner.split(","))}


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample exported by a tiny run, on a host with a simulated GPU."""
    gpu = {name.removeprefix("trainkit_"): 1.0 for name in SERIES if "gpu" in name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStats, "of_gpu", lambda self: gpu)
        patch.setattr(prometheus, "_gpus_of", lambda trainer: range(1))
        samples = exported(tmp_path_factory.mktemp("exports"), max_epochs=1)[-1]
    return {
        name: {label for labels, _ in values for label in labels}
        for name, values in samples.items()
    }


def test_all_series_of_the_table_are_exported(labels: dict[str, set[str]]) -> None:
    """Every series of the table exists after a real fit: an unfilled series would be found here."""
    exported = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in labels
    }
    assert exported == set(SERIES)


def test_there_is_something_to_check() -> None:
    """The files are found: a guard without files would always pass."""
    assert len(TARGETS) >= 20
    assert len(RULES) >= 6
    assert len(VARIABLES) == 2


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_asks_for_what_is_exported(expr: str, labels: dict[str, set[str]]) -> None:
    """Its series exist, and so do its labels, at each of its series."""
    names = names_in(expr)
    assert names
    assert names <= set(labels)
    for name in names:
        assert labels_in(expr) <= labels[name] | {"le", "run", "rank", "host"}
    if "le" in labels_in(expr):
        assert any("le" in labels[name] for name in names)
    assert expr.count("(") == expr.count(")")
    assert expr.count("{") == expr.count("}")


@pytest.mark.parametrize("query", VARIABLES)
def test_a_variable_of_the_dashboard_lists_what_is_exported(
    query: str, labels: dict[str, set[str]]
) -> None:
    """label_values(series, label)."""
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert match is not None
    assert match[2] in labels[match[1]]


@pytest.mark.parametrize(("title", "target"), TARGETS)
def test_a_legend_shows_labels_that_the_query_leaves(
    title: str, target: dict[str, Any], labels: dict[str, set[str]]
) -> None:
    """A label that an aggregation has dropped would be an empty legend."""
    shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
    grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
    there = (
        set.intersection(*({label.strip() for label in inner.split(",")} for inner in grouped))
        if grouped
        else None
    )
    name, *_ = sorted(names_in(target["expr"]))
    assert shown <= (labels[name] if there is None else there), title


def test_variables_in_queries_are_those_of_the_dashboard() -> None:
    """$run and the like are filled in by Grafana."""
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    used = {
        name
        for _, target in TARGETS
        for name in re.findall(r"\$\{?(\w+)", target["expr"] + target["datasource"]["uid"])
    }
    assert used <= known
    assert {"run", "metric", "datasource"} <= used


def test_panels_do_not_cover_each_other() -> None:
    """Each panel has its own number and place on the 24 columns."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_what_prometheus_asks_for(rule: dict[str, Any]) -> None:
    """An alert has the keys of a rule file, a severity, a meaning, and a remedy."""
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Trainkit[A-Z]\w+", rule["alert"])
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    grouped = [set(inner.split(", ")) for inner in re.findall(r"\bby \(([^)]*)\)", rule["expr"])]
    assert shown <= (set.intersection(*grouped) if grouped else {"run", "rank", "host", "gpu"})


def test_the_alerts_that_were_asked_for_are_there() -> None:
    """Stalls, a vanished job, waiting for data, a non-finite loss,
    a drop of throughput, a full GPU.
    """
    asked = {
        "Stalled",
        "Gone",
        "WaitsForData",
        "LossNotFinite",
        "ThroughputDropped",
        "GpuMemoryNearlyFull",
    }
    assert {f"Trainkit{name}" for name in asked} <= {rule["alert"] for rule in RULES}


def test_no_gpu_is_asked_for_on_a_host_without_one() -> None:
    """Queries of a GPU's numbers return nothing without a GPU."""
    assert DeviceStats(torch.device("cpu")).of_gpu() == {}
