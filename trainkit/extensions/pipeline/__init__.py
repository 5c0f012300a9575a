"""engine=fsdp engine.pipeline=N: stages of a model's layers on different ranks
(docs/large_models.md).

pipeline.py      Pipeline: what FSDPEngine asks; the order of forwards and backwards
units.py         the layers of a Task in order, and where they are cut
work.py          the operations of each layer, counted from the shapes of a sample
passes.py        one forward of a stage: what it receives, computes, and hands on
placeholder.py   stands for a tensor that another stage computes: its shape, and no values
stages.py        what a plan shows of it
links.py         what travels between neighbouring stages
shared.py        gradients of weights that several stages hold
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="pipeline",
    summary="engine.pipeline: stages of a model's layers on different ranks, with engine=fsdp",
    proven="each commit, on ranks of the CPU; not on a GPU yet",
    layouts={"pipeline": "trainkit.extensions.pipeline.pipeline.Pipeline"},
)
