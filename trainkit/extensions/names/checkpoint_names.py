"""Attributes by which Lightning's ModelCheckpoint forms names of files, and which nothing reads here."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.api.view import RunView
from trainkit.arguments import show
from trainkit.callbacks.checkpoint import checkpoint_policies

_IN_FILENAME = "write it in `filename`, with auto_insert_metric_name=False."
# name -> (Lightning's value, what is so here)
_ATTRIBUTES = {
    "CHECKPOINT_NAME_LAST": (
        "last",
        "the link to the newest checkpoint is `last`, and last_model_path is its own path.",
    ),
    "CHECKPOINT_JOIN_CHAR": ("-", _IN_FILENAME),
    "CHECKPOINT_EQUALS_CHAR": ("=", _IN_FILENAME),
    "FILE_EXTENSION": (".ckpt", "a checkpoint is a folder; `filename` is its whole name."),
    "STARTING_VERSION": (1, "the second checkpoint of a name is NAME-v1."),
}


def unread(run: RunView) -> Iterator[str]:
    """Yield those that a ModelCheckpoint has."""
    for policy in checkpoint_policies(run.callbacks):
        for name, (usual, here) in _ATTRIBUTES.items():
            value = getattr(policy, name, usual)
            if value != usual:
                yield f"ModelCheckpoint.{name} is {show(value)}, and has no effect here: {here}"
