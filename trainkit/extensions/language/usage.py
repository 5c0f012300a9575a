"""What `data tokens` and `generate` take."""

from trainkit.cli.usage import CKPT, TRUST
from trainkit.extension import Usage

TOKENS = Usage(
    "TEXTS output=FOLDER [key=value ...]",
    "Write a .txt, a .jsonl or a folder of them as numbers, for conf=gpt_124m and conf=bert. A .txt"
    " is a document, and so is each line of a .jsonl, by its text.",
    (
        ("output", "FOLDER", "", "the folder to write, which does not exist yet"),
        ("tokenizer", "FILE", "bytes", "a tokenizer.json; needs trainkit[transformers]"),
        ("val", "float", "0.1", "the share of the tokens to hold out"),
        (
            "end_of_text",
            "TOKEN",
            "<|endoftext|> or alike",
            "the tokenizer's token that ends a document",
        ),
    ),
    ("texts output=tokens tokenizer=tokenizer.json",),
)

GENERATE = Usage(
    "RUN_DIR prompt=TEXT | prompts=FILE [key=value ...]",
    "Continue a text with the model of a run; a chat model answers it.",
    (
        ("prompt", "TEXT", "none", "the text to continue, or the message to answer"),
        ("prompts", "FILE", "none", "one in each line; each is answered as it would be alone"),
        ("batch_size", "int", "16", "prompts of the file that are answered together"),
        ("system", "TEXT", "", "a message of the system before it, for a chat model"),
        ("max_new_tokens", "int", "256", "tokens to sample"),
        (
            "temperature",
            "float",
            "0.8",
            "divides the logits: below 1 likelier text, 0 the likeliest token each time",
        ),
        ("top_k", "int", "all", "sample among this many likeliest tokens"),
        (
            "top_p",
            "float",
            "all",
            "sample among the fewest tokens of this probability together",
        ),
        ("seed", "int", "0", "of the draws"),
        (
            "tokenizer",
            "FILE",
            "the run's, or bytes",
            "a tokenizer.json; for a model of transformers, a folder",
        ),
        ("ckpt_path", CKPT, "best, or last if there is none", "the checkpoint"),
        TRUST,
    ),
    (
        'runs/text prompt="Once upon a time"',
        "runs/text prompt=Once max_new_tokens=100 temperature=0",
        'runs/chat prompt="1 + 1 = ?" temperature=0',
        "runs/chat prompts=questions.txt max_new_tokens=50",
    ),
    takes_run=True,
)
