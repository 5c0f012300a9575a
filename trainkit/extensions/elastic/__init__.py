"""Elastic: a fit of Horovod's ranks continues when ranks die, leave or join (docs/elastic.md)."""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="elastic",
    summary=(
        "horovodrun --min-np and --host-discovery-script: ranks that are lost are replaced, and"
        " others join"
    ),
    proven="lost, late and frozen ranks each commit; storms of faults in the full test run",
    ranks={"TRAINKIT_WORKER": "trainkit.engine.horovod.elastic.elastic_ranks"},
)
