"""conversations.py: files of messages, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import DataError
from trainkit.extensions.language.conversations import conversation_of, read_conversations

ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2", "weight": 0},
        ]
    },
]


def test_a_file_of_any_kind_gives_the_same_conversations(tmp_path: Path) -> None:
    """A .jsonl, a .parquet and a folder of datasets: columns that a row lacks are absent in it."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    held = datasets.Dataset.from_list(ROWS)
    held.to_parquet(str(tmp_path / "a.parquet"))
    held.save_to_disk(str(tmp_path / "folder"))
    for name in ("a.jsonl", "a.parquet", "folder"):
        result = read_conversations(tmp_path / name)
        assert [list(each.messages) for each in result] == [row["messages"] for row in ROWS]
        assert result[1].place == f"{tmp_path / name}, row 2"


def test_a_call_of_a_tool_needs_no_text() -> None:
    """Its content may be missing; the row's tools go to the chat template."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    result = conversation_of({"messages": [call], "tools": [{"name": "add"}]}, "row 1")
    assert result.messages == [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    assert result.tools == [{"name": "add"}]


def call(arguments: Any) -> dict[str, Any]:
    """Return a message that calls a tool."""
    function = {"name": "add", "arguments": arguments}
    calls = [{"type": "function", "id": "1", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_what_is_json_text_is_what_it_says(tmp_path: Path) -> None:
    """Tools, arguments of calls in OpenAI's form, and variables of the template: in a row, and in
    the column of a .parquet.
    """
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    tools, variables = [{"name": "add"}], {"enable_thinking": False}
    row = {"messages": [call('{"a": 1}')], "tools": json.dumps(tools)}
    row["chat_template_kwargs"] = json.dumps(variables)
    parquet.write_table(table.from_pylist([row]), tmp_path / "a.parquet")
    plain = {"messages": [call({"a": 1})], "tools": tools, "chat_template_kwargs": variables}
    expected = conversation_of(plain, "row 1")
    assert expected.messages == [call({"a": 1})] and expected.variables == variables
    for result in (conversation_of(row, "row 1"), *read_conversations(tmp_path / "a.parquet")):
        assert result._replace(place="row 1") == expected
    assert conversation_of({"messages": [call("")]}, "here").messages == [call({})]


def test_an_argument_that_a_call_lacks_is_not_null_in_a_table(tmp_path: Path) -> None:
    """A column of a .parquet has the arguments of all calls, and the properties of all tools."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    tools = [{"properties": {"a": {"type": "number"}}}, {"properties": {"b": {"type": "text"}}}]
    rows = [{"messages": [call({name: 1})], "tools": tools} for name in "ab"]
    parquet.write_table(table.from_pylist(rows), tmp_path / "a.parquet")
    for row, result in zip(rows, read_conversations(tmp_path / "a.parquet"), strict=True):
        assert result.messages == row["messages"] and result.tools == tools


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    """As datasets reads a .jsonl; an editor leaves one at the end."""
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "a.jsonl").write_text("\n" + "\n\n".join(lines) + "\n\n")
    assert len(read_conversations(tmp_path / "a.jsonl")) == len(ROWS)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [call("{")]}, "here, message 1, tool call 1: its arguments are .* not JSON"),
        ({"messages": [call("[1]")]}, r"tool call 1: its arguments are the text '\[1\]'; it must"),
        ({"tools": "{"}, "here: its tools are a text that is not JSON"),
        ({"tools": '{"name": "add"}'}, "here: its tools are of type dict; they must be a list"),
        ({"chat_template_kwargs": "{"}, "here: chat_template_kwargs is a text that is not JSON"),
        ({"chat_template_kwargs": [1]}, "here: chat_template_kwargs is of type list; it must be"),
    ],
)
def test_what_stands_beside_the_texts_is_checked(row: dict[str, Any], text: str) -> None:
    """The error names the row, the message, and what is legal."""
    with pytest.raises(DataError, match=text):
        conversation_of(ROWS[0] | row, "here")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "x"}, "here has no 'messages'; it has text"),
        ([], "here has no 'messages'; it has nothing of the kind"),
        ({"conversations": []}, "Rename the column conversations to messages, from to role"),
        ({"messages": []}, "its messages are empty"),
        ({"messages": "hi"}, "its messages are empty or no list"),
        ({"messages": ["hi"]}, "message 1 is 'hi'; it must be a role and a content"),
        ({"messages": [{"role": "human", "content": "x"}]}, "'human'; .* Call it 'user'"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "Did you mean 'assistant'"),
        ({"messages": [{"role": "user"}]}, "has a content of type NoneType; it must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of type list"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 2}]}, "the weight 2"),
    ],
)
def test_a_row_that_is_not_a_conversation_is_named(row: Any, text: str) -> None:
    """The error names the row, the message, and what is legal."""
    with pytest.raises(DataError, match=text):
        conversation_of(row, "here")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '{"messages": []\n', "line 1 is not JSON"),
        ("a.csv", "messages\n", "is of another kind; give a .jsonl"),
        ("a.parquet", "no parquet", "cannot be read as parquet"),
        ("b.jsonl", None, "does not exist; give a .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    name: str, content: str | None, text: str, tmp_path: Path
) -> None:
    """The error names the file and the kinds that are legal."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=text):
        read_conversations(tmp_path / name)


def test_a_folder_that_is_none_of_datasets_is_named(tmp_path: Path) -> None:
    """And one of several splits, whose parts are named."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    with pytest.raises(DataError, match="is not a folder of datasets' save_to_disk"):
        read_conversations(tmp_path)
    parts = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    parts.save_to_disk(str(tmp_path / "parts"))
    with pytest.raises(DataError, match="has the splits train; give the folder of one"):
        read_conversations(tmp_path / "parts")
