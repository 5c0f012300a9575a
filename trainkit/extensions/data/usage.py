"""What `data` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "PART [key=value ...]",
    "Look at data, or write it in another form; the parts and what they take follow.",
    examples=("check --help",),
)
