"""Texts as tokens (data tokens), and texts that a trained model continues:
generate (docs/language_models.md).
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="language",
    summary=(
        "data tokens: texts as numbers for language models; generate: texts that a run's model"
        " continues"
    ),
    proven="each commit",
    commands={
        "data tokens": Command(
            summary="write texts as tokens",
            main="trainkit.extensions.language.tokens_command.main",
            usage="trainkit.extensions.language.usage.TOKENS",
        ),
        "generate": Command(
            summary="continue a text with a run's model (RUN_DIR prompt='...')",
            main="trainkit.extensions.language.generate_command.main",
            usage="trainkit.extensions.language.usage.GENERATE",
        ),
    },
)
