"""Reports of runs: tables in the terminal, and pages.

show/            `show` and `runs`: curves, rates and checkpoints of runs, side by side
status/          `status`: what a run does now, or how it ended
classification/  an image classifier's scores, on the page that `test` leaves
data_check.py    `data check` (data_command.py): the samples that cannot be loaded
page.py          a page: plots, tables, dark and light; other extensions write theirs with it
grid.py          a table for a terminal and for a page; colors.py
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="reports",
    summary="show, runs, status: what runs do and did, as tables and pages; data check",
    proven="each commit; pages in a browser in the full test run",
    commands={
        "show": Command(
            "show curves, rates and checkpoints of a run, or of several, on one page (RUN_DIR ...)",
            "trainkit.extensions.reports.show.command.main",
            "trainkit.extensions.reports.usage.SHOW",
        ),
        "status": Command(
            "tell what a running or ended job does: state, ranks, step, rate, alerts"
            " (RUN_DIR --watch)",
            "trainkit.extensions.reports.status.command.main",
            "trainkit.extensions.reports.usage.STATUS",
        ),
        "runs": Command(
            "print a table of the runs below a folder (DIR sort=val/acc --json)",
            "trainkit.extensions.reports.show.runs_command.main",
            "trainkit.extensions.reports.usage.RUNS",
        ),
        "data check": Command(
            "list samples that cannot be loaded",
            "trainkit.extensions.reports.data_command.main",
            "trainkit.extensions.reports.usage.DATA_CHECK",
        ),
    },
)
