"""chat_template.py: which tokens are answers, and what is cut and left out."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.sft_data import byte_tokenizer
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.chat_template import encode_all, use_template
from trainkit.extensions.language.conversations import Conversation

pytest.importorskip("transformers")

ASKED = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "No"},
)
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
# drops earlier answers, as templates of models that think do with their thoughts
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)


def talk(*messages: Any) -> list[Conversation]:
    """Return one conversation."""
    return [Conversation(messages, None, "a.jsonl, row 1")]


def trained(conversations: list[Conversation], tokenizer: Any, **options: Any) -> list[str]:
    """Return the texts of all stretches of tokens that are predicted."""
    given: dict[str, Any] = {"loss": "answers", "max_length": 999, "too_long": "cut"}
    result = encode_all(conversations, tokenizer, **given | options)
    parts, open_ = [], False
    for token, is_trained in zip(result.tokens, result.trained, strict=True):
        if is_trained and not open_:
            parts.append([])
        if is_trained:
            parts[-1].append(token)
        open_ = bool(is_trained)
    return [tokenizer.decode(part) for part in parts]


def test_answers_alone_are_predicted_with_the_token_that_ends_them() -> None:
    """All turns of the assistant, without the template's prompt for them."""
    tokenizer = byte_tokenizer()
    assert trained(talk(*ASKED), tokenizer) == ["Yes?<|im_end|>\n", "No<|im_end|>\n"]
    (everything,) = trained(talk(*ASKED), tokenizer, loss="all")
    assert everything == tokenizer.apply_chat_template(ASKED, tokenize=False)


def test_a_template_that_marks_answers_is_believed() -> None:
    """What stands between {% generation %} and its end is predicted, nothing else."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = MARKED
    assert trained(talk(*ASKED), tokenizer) == ["Yes?", "No"]


@pytest.mark.parametrize("template", [None, MARKED])
def test_an_answer_of_weight_0_is_read_and_not_predicted(template: str | None) -> None:
    """With marks in the template and without."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    messages = [ASKED[0], ASKED[1] | {"weight": 0}, *ASKED[2:]]
    (answer,) = trained(talk(*messages), tokenizer)
    assert "No" in answer
    assert "Yes" not in answer


def test_a_template_that_rewrites_earlier_answers_is_refused() -> None:
    """Which of its tokens are answers cannot be known; all tokens can be predicted."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(DataError, match=r"row 1, message 2: .* writes it differently .*loss=all"):
        trained(talk(*ASKED), tokenizer)
    assert trained(talk(*ASKED), tokenizer, loss="all") == ["[user]Hi[user]Bye[assistant]No"]


def test_a_conversation_that_begins_with_an_answer_is_refused() -> None:
    """There is no text after which it would be predicted."""
    with pytest.raises(DataError, match=r"row 1 begins with an answer"):
        trained(talk(ASKED[1]), byte_tokenizer())


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    """The template's own reason is in the message."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message, please') }}"
    with pytest.raises(DataError, match=r"row 1: the chat template refuses it: .*no system"):
        trained(talk(*ASKED), tokenizer)


def test_a_rows_variables_reach_the_template() -> None:
    """As TRL's chat_template_kwargs, with marks of answers and without; what it does not read has
    no effect, and is refused.
    """
    for template in (MARKED, byte_tokenizer().chat_template):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = "{{ '(quiet)' if not enable_thinking }}" + template
        (plain,) = talk(*ASKED)
        row = plain._replace(variables={"enable_thinking": True})
        (text,) = trained([row], tokenizer, loss="all")
        assert f"(quiet){text}" == trained([plain], tokenizer, loss="all")[0]
        assert trained([row], tokenizer) == trained([plain], tokenizer)
    for name, said in (("thinking", "which the chat template does not read"), ("tools", "own")):
        with pytest.raises(DataError, match=rf"row 1: chat_template_kwargs has '{name}', .*{said}"):
            trained([plain._replace(variables={name: True})], tokenizer)


def test_documents_that_are_too_long_are_cut_or_left_out_and_counted() -> None:
    """One whose answers all stand beyond the cut has nothing to predict, and is left out too."""
    tokenizer = byte_tokenizer()
    long, silent = talk(*ASKED), talk(ASKED[0] | {"content": "x" * 60}, ASKED[1])
    short = talk(*ASKED[2:])
    size = len(tokenizer.apply_chat_template(list(ASKED[2:]), tokenize=True)["input_ids"])
    rows = [*long, *silent, *short]
    cut = encode_all(rows, tokenizer, "answers", size, "cut")
    assert (len(cut), cut.num_cut, cut.num_too_long, cut.num_silent) == (2, 2, 0, 1)
    assert cut.lengths() == [size, size]
    left = encode_all(rows, tokenizer, "answers", size, "leave_out")
    assert (len(left), left.num_cut, left.num_too_long, left.num_silent) == (1, 0, 2, 0)
    assert left.document(0).ids.tolist() == cut.document(1).ids.tolist()
    with pytest.raises(DataError, match=f"row 1 has .* tokens; data.max_length is {size}"):
        encode_all(rows, tokenizer, "answers", size, "refuse")


def test_a_tokenizer_without_a_template_needs_one() -> None:
    """The error says which setting gives it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match=r"is 'some', which has no chat template\. .*=FILE\.jinja"
    ):
        use_template(tokenizer, None, "some")
