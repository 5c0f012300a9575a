"""engine=fsdp engine.context=N: ranks that share the tokens of each sample, so that the activations
of a long sequence are split over them (docs/large_models.md).

sequence.py      what a Task and its layers call: part, attention, sum_of_parts, ...
parts.py         which tokens a rank has, and which keys they see
ranks.py         ContextRanks: what FSDPEngine asks; links between the ranks of a group
transformers.py  the same attention for models of transformers
pretended.py     a rank's step in one process, whose memory plan measures
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="context",
    summary="engine.context: the tokens of each sample on different ranks, with engine=fsdp",
    proven="each commit, on ranks of the CPU; not on a GPU yet",
    layouts={"context": "trainkit.extensions.context.ranks.ContextRanks"},
)
