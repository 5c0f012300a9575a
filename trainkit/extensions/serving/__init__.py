"""serve: HTTP requests answered by a run's model or an export, on Ray Serve or in one process
(docs/checkpoints.md).

model.py holds the model, batching.py joins requests to batches, app.py is the ASGI app, serve.py
runs it on Ray or alone. For texts (api=openai) these are text_model.py, text_batching.py and
openai_app.py; openai_format.py reads the requests.
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="serving",
    summary=(
        "serve: HTTP requests answered by a run's model or an export; api=openai: chats and texts"
    ),
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
