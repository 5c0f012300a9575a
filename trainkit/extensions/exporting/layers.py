"""Callbacks of a config that replace layers of its Task: a checkpoint fits it with them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.api.layers import change_layers
from trainkit.api.task import Task
from trainkit.config.instantiate import instantiate
from trainkit.config.roles import role_of


def replacing_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return these callbacks of a config, not built."""
    given = config.get("callbacks") or {}
    return {key: node for key, node in given.items() if role_of(node) == "layers"}


def make_layers(task: Task, config: Mapping[str, Any]) -> None:
    """Let a Task without a run make its layers, and these callbacks replace some."""
    task._make_model()
    given = replacing_layers(config).items()
    changes = [instantiate(node, f"callbacks.{key}", config["trust"]) for key, node in given]
    change_layers(task, changes, lambda function: function())
