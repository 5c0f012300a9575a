"""DeepSpeed's ZeRO behind the wall.

engine.py      DeepSpeedEngine: DeepSpeed's engine owns backward, sums, clipping and update
refusals.py    what DeepSpeed cannot serve, and why
config.py      writes DeepSpeed's config from trainkit's settings, and checks the user's own against them
sections.py    the sections of the user's config that trainkit has a value for
split.py       weights and optimizer state: whole from the parts that ranks hold, and back
adapter.py     DeepSpeed itself: the only file that imports it
extensions.py  the compiled parts of DeepSpeed: where they are built, and which are there
    parts.py       a process that compiles one of them
    proof.py       a job of two ranks that tries each stage and offload
"""
