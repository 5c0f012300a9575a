"""Texts as tokens (data tokens), mixtures, conversations, pairs of answers (conf=llama, sft, dpo);
generate continues or answers them (docs/language_models.md).
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="language",
    summary=(
        "conf=sft, conf=dpo: conversations and pairs as tokens; data tokens: texts as numbers;"
        " generate: texts that a run's model continues or answers"
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
