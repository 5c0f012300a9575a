"""Recordings of steps on all ranks: callbacks=timeline, and `timeline` and `scaling`, which read
them (docs/logging.md).

callback.py   records steps on all ranks, and makes one file of them
traces/       what each rank writes of itself, how their clocks are aligned, and the one file that all become
report/       what a recording says: a table, advice, a page
scaling/      the time of a step at other numbers of ranks
"""

from trainkit.extension import Command, Extension

_TIMELINE = "trainkit.extensions.timeline.callback.Timeline"

EXTENSION = Extension(
    name="timeline",
    summary=(
        "callbacks=timeline records steps on all ranks; timeline reports them; scaling predicts"
        " larger jobs"
    ),
    proven="each commit; events of a GPU not yet",
    commands={
        "timeline": Command(
            summary=(
                "report recorded steps as a table and a page (RUN_DIR; callbacks=timeline records)"
            ),
            main="trainkit.extensions.timeline.command.main",
            usage="trainkit.extensions.timeline.usage.TIMELINE",
        ),
        "scaling": Command(
            summary="run a config at several numbers of ranks (ranks=1,2), and predict larger ones",
            main="trainkit.extensions.timeline.scaling.command.main",
            usage="trainkit.extensions.timeline.usage.SCALING",
        ),
    },
    targets=(_TIMELINE, "trainkit.extensions.timeline.scaling.allreduce_costs.AllreduceCosts"),
    names={"trainkit.callbacks.Timeline": _TIMELINE},
)
