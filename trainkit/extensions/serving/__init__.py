"""serve: HTTP requests answered by a run's model or an export, on Ray Serve or in one process
(docs/evaluating.md).

model.py holds the model, batching.py joins requests to batches, app.py is the ASGI app, serve.py
runs it on Ray or alone.
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="serving",
    summary="serve: HTTP requests answered by a run's model or an export",
    proven="each commit in one process; on Ray Serve in the full test run",
    commands={
        "serve": Command(
            summary=(
                "answer HTTP requests with a run's model or an export, on Ray Serve or in one"
                " process"
            ),
            main="trainkit.extensions.serving.command.main",
            usage="trainkit.extensions.serving.usage.USAGE",
        )
    },
)
