"""Which test runs the commands of which page: of each part of it, if parts have tests of their own.

The site prints it at each page's end, with the day on which the test's group ran.
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = "e2e/test_guides.py"
TUTORIALS = "e2e/test_tutorials.py"
# Page: heading of a part: its test. "" is the rest of the page. Tests outside of `e2e` need a
# cluster, other packages or more care.
TESTS: dict[str, dict[str, str]] = {
    "checkpoints": {"": GUIDES},
    "communication": {
        "": "e2e/test_communication_page.py",
        "Ranks of unequal speed": "parallel/test_rank_shares.py",
    },
    "configs": {"": GUIDES},
    "conformance": {"": "conformance/test_conformance.py"},
    "data": {"": GUIDES, "Data at a cluster's scale": "e2e/test_data_at_scale_page.py"},
    "elastic": {"": GUIDES, "Reliability": "architecture/test_reliability_page.py"},
    "errors": {"": "e2e/test_errors_page.py"},
    "horovod": {"": GUIDES, "Horovod on MPI": "mpi/test_page.py"},
    "index": {"": "e2e/test_readme.py"},
    "kubernetes": {"": "extensions/kubernetes/test_refusals.py"},
    "language_models": {
        "": "e2e/test_language_models.py",
        "Pre-train a small language model": "e2e/test_pretraining_page.py",
        "Chat models": "e2e/test_chat_models.py",
    },
    "large_models": {
        "": "e2e/test_large_models_page.py",
        "Does my model train the same?": GUIDES,
        "engine=deepspeed": "parallel/test_zero.py",
    },
    "launchers": {"": GUIDES, "Several hosts": "hosts/test_two_hosts.py"},
    "lightning": {"": "same_names/test_same_names.py"},
    "logging": {"": GUIDES, "What a job does now": "e2e/test_status.py"},
    "how_it_works": {"Extensions": "extensions/test_third_party.py"},
    "migrate": {
        "From Horovod or torchrun": TUTORIALS,
        "From Accelerate or Fabric": TUTORIALS,
        "From transformers' Trainer": TUTORIALS,
    },
    "optimizers": {
        "": GUIDES,
        "Finding settings": "e2e/test_finding_page.py",
        "Experiments with pairs": GUIDES,
    },
    "ray": {"": "ray/test_page.py"},
    "slurm": {"": "slurm/test_page.py"},
    "tutorial_cluster": {"": TUTORIALS},
    "tutorial_killed": {"": TUTORIALS},
    "tutorial_script": {
        "": TUTORIALS,
        "The tools for your own script": GUIDES,
        "Your own loop": GUIDES,
    },
    "tutorial_slow": {"": TUTORIALS},
}

_SLOWEST = (
    "horovodrun -np 2 python -m trainkit fit conf=resnet50 callbacks=timeline run_dir=runs/seen"
)
# Page: its command that another page has, too: the page whose test runs it. What follows on the first
# page needs nothing of it.
ELSEWHERE: dict[str, dict[str, str]] = {
    "checkpoints": {"python -m trainkit check-resume conf=mlp kill_at=17": "tutorial_killed"},
    "configs": {"python -m trainkit fit conf=gpt data.file=my.txt run_dir=runs/text": "data"},
    "data": {"python -m trainkit fit conf=resnet50 task.model=mobilenet_v3_small": "configs"},
    "launchers": {"python -m trainkit doctor": "logging"},
    "tutorial_cluster": {"python -m trainkit doctor": "logging"},
    "tutorial_slow": {
        _SLOWEST: "logging",
        "python -m trainkit timeline runs/seen": "logging",
    },
}


def parts_of(test: str) -> list[tuple[str, str]]:
    """Return the (page, heading) that a test runs."""
    return [
        (page, title) for page, parts in TESTS.items() for title in parts if parts[title] == test
    ]
