"""evaluate: a causal model by a suite of tasks: lm-eval's own harness (docs/language_models.md)."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="suites",
    summary="evaluate suite=lm-eval: tasks of the field, by their own harness",
    proven="each commit on local tasks; on a GPU not yet",
    commands={
        "evaluate": Command(
            summary="evaluate a language model on tasks (RUN_DIR suite=lm-eval tasks=...)",
            main="trainkit.extensions.suites.command.main",
            usage="trainkit.extensions.suites.usage.USAGE",
        )
    },
)
