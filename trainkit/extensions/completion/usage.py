"""What `completion` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "bash",
    'Print the shell function for tab completion: eval "$(python -m trainkit completion bash)"',
    examples=("bash",),
)
