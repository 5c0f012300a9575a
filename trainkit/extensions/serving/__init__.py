"""serve: HTTP requests answered by a run's model or an export, on Ray Serve or in one process (docs/evaluating.md)."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="serving",
    summary="serve: HTTP requests answered by a run's model or an export",
    proven="each commit in one process; on Ray Serve in the full test run",
    commands={
        "serve": Command(
            summary="answer HTTP requests with a run's model or an export, on Ray Serve or in one process",
            main="trainkit.cli.serve.main",
        )
    },
)
