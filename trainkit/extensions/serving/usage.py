"""What `serve` takes."""

from trainkit.cli.usage import TRUST
from trainkit.extension import Usage

USAGE = Usage(
    "RUN_DIR | FILE | FOLDER [key=value ...]",
    "Answer HTTP requests with a run's model or an export (.pt2, .onnx), until a signal comes. On"
    " Ray Serve if Ray is installed, else in one process. A run without an export is exported"
    " first. api=openai: with the texts of a run's language model, or of a folder of transformers.",
    (
        (
            "api",
            "predict | openai",
            "predict",
            "openai: texts of a causal model, in the format of OpenAI's API, in one process",
        ),
        ("port", "int", "8000", "the port"),
        ("host", "ADDRESS", "127.0.0.1", "the address to listen at; 0.0.0.0 for all"),
        ("backend", "auto | ray | local", "auto", "ray, or local for one process without Ray"),
        ("replicas", "int", "1", "processes that answer, on Ray"),
        ("cpus", "float", "1", "of each replica, on Ray"),
        ("max_batch_size", "int", "32", "samples of a call of the model at most"),
        ("batch_wait_ms", "float", "5", "so long the first sample of a batch waits for others"),
        ("max_body_mb", "float", "16", "the largest body of a request, in MiB"),
        ("max_waiting", "int", "1024", "samples that may wait; more are refused with 503"),
        (
            "client_timeout_s",
            "float",
            "60",
            "seconds for a client to send its request and to read; a slower one is cut off",
        ),
        ("max_new_tokens", "int", "1024", "of api=openai: tokens of an answer at most"),
        ("tokenizer", "FILE", "the run's, or bytes", "of api=openai: as of generate"),
        TRUST,
    ),
    (
        "runs/mine",
        "runs/mine/export/mlp.pt2 port=9000 backend=local",
        "runs/chat api=openai",
        "my-gpt api=openai max_new_tokens=200",
    ),
    takes_run=True,
)
