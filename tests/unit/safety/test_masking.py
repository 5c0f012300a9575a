"""Secrets: which keys are, and what is left of their values."""

from __future__ import annotations

import pytest

from trainkit.safety.masking import is_secret, masked, masked_arguments, scrubbed


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "logger.wandb.api_key",
        "HF_TOKEN",
        "password",
        "client_secret",
        "apiKey",
        "credentials",
    ],
)
def test_keys_of_secrets(key: str) -> None:
    """Each is recognised at any depth and in any case."""
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["pad_token", "tokens_per_sample", "max_tokens", "tokenizer", "key", "secretary", "author"],
)
def test_other_keys_stay(key: str) -> None:
    """Words of tokenizers are no secrets."""
    assert not is_secret(key)


def test_texts_alone_are_masked() -> None:
    """Numbers, null and interpolations stay; values are masked inside other texts."""
    tree = {
        "token": "abcdef",
        "n": [{"password": None, "api_key": "${oc.env:A}", "auth": 3}],
        "url": "x://hidden-1@h",
    }
    assert masked(tree, ["hidden-1"]) == {
        "token": "***",
        "n": [{"password": None, "api_key": "${oc.env:A}", "auth": 3}],
        "url": "x://***@h",
    }
    assert scrubbed("no abc", ["abc"]) == "no abc"


def test_a_command_line_is_masked() -> None:
    """Overrides and options."""
    words = [
        "python",
        "++task.token=abc",
        "--api-key",
        "abc",
        "--api-key=abc",
        "task.lr=1",
        "a.secret=${oc.env:S}",
    ]
    assert masked_arguments(words) == [
        *(
            "python",
            "++task.token=***",
            "--api-key",
            "***",
            "--api-key=***",
            "task.lr=1",
            "a.secret=${oc.env:S}",
        ),
    ]
