"""What `evaluate` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.cli.usage import CKPT, TRUST
from trainkit.extension import Usage

USAGE = Usage(
    "RUN_DIR suite=lm-eval tasks=TASK,... [key=value ...]",
    "Evaluate the causal model of a run, or of a folder of transformers, by lm-eval's own harness:"
    " its tasks by their names, or files of tasks (needs trainkit[lm_eval]). The settings are"
    " lm-eval's, of the same names. Of a run the results are left in"
    " reports/lm-eval/CHECKPOINT.json.",
    (
        ("suite", "lm-eval", "", "the harness"),
        ("tasks", "TASK,...", "", "names of lm-eval's tasks or groups, or .yaml files of tasks"),
        ("include_path", "FOLDER", "none", "of further files of tasks, which have names then"),
        ("limit", "int | float", "all", "samples of each task, or a share of them below 1"),
        ("num_fewshot", "int", "the task's", "examples before each question"),
        ("batch_size", "int | auto", "1", "texts that are read together"),
        ("apply_chat_template", "bool", "false", "ask in the chat template of the tokenizer"),
        ("ckpt_path", CKPT, "best, or last if there is none", "the run's checkpoint"),
        TRUST,
        OPTION,
    ),
    (
        "runs/chat suite=lm-eval tasks=hellaswag,arc_easy batch_size=8",
        "runs/chat suite=lm-eval tasks=sums.yaml limit=100 --json",
        "my-gpt suite=lm-eval tasks=lambada_openai",
    ),
    takes_run=True,
)
