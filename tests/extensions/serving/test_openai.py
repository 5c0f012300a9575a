"""serve api=openai: OpenAI's own client talks with a tiny model over HTTP (on a socket of the file
system), whole and streamed; bad requests are answered with its errors.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
import uvicorn

from recipes.sft_data import byte_tokenizer
from trainkit.cli.run import main as fit
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.language.sampling import Ask, begin, continue_all, pieces_of
from trainkit.extensions.language.sources import TransformersSource
from trainkit.extensions.serving import command
from trainkit.extensions.serving.app import ServiceOptions
from trainkit.extensions.serving.openai_app import TextService
from trainkit.extensions.serving.openai_format import read_chat
from trainkit.extensions.serving.text_model import open_text_model

ROOM = 256
CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1 = ?"},
]


def tiny(eos_token_id: int | None = None) -> TransformersSource:
    """Return a model of bytes with random weights, and its tokenizer with a chat template."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=ROOM,
        eos_token_id=eos_token_id,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[:32].zero_()  # letters
        model.lm_head.weight[130:].zero_()
        model.lm_head.weight.mul_(20)
    return TransformersSource(model, byte_tokenizer())


class Server:
    """A service on a socket of the file system, and clients of it."""

    def __init__(self, service: TextService, folder: Path) -> None:
        self._socket = str(folder / "socket")
        config = uvicorn.Config(service.app(), uds=self._socket, log_level="critical")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self.http = self.client_of_its_own()

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()

    def client_of_its_own(self) -> httpx.Client:
        """Return a client of HTTP with connections that no other has."""
        transport = httpx.HTTPTransport(uds=self._socket)
        return httpx.Client(transport=transport, base_url="http://here", timeout=60)

    def client(self) -> openai.OpenAI:
        """Return OpenAI's client."""
        return openai.OpenAI(
            api_key="none", base_url="http://here/v1", http_client=self.http, max_retries=0
        )


@pytest.fixture(scope="module")
def source() -> TransformersSource:
    """Return the model."""
    return tiny()


@pytest.fixture(scope="module")
def server(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve it."""
    options = ServiceOptions(batch_wait_ms=100, max_waiting=8)
    service = TextService(source, "tiny", 64, options)
    with Server(service, tmp_path_factory.mktemp("serve")) as server:
        yield server


def expected(source: Any, prompt: Any, **draws: Any) -> str:
    """Return the answer of the model by itself."""
    return "".join(pieces_of(source, Ask(prompt, **draws)))


def test_a_chat_is_answered(server: Server, source: Any) -> None:
    """By the chat template, with the tokens counted; a seed repeats it, content may be in parts."""
    asked = {"model": "tiny", "max_tokens": 12, "seed": 3, "temperature": 0.7, "top_p": 0.9}
    answer = server.client().chat.completions.create(messages=CHAT, **asked)
    text = expected(source, CHAT, max_new_tokens=12, seed=3, temperature=0.7, top_p=0.9)
    assert answer.choices[0].message.content == text
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == (
        "assistant",
        "length",
    )
    usage, prompt = answer.usage, begin(source, Ask(CHAT)).num_prompt
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 12)
    assert usage.total_tokens == prompt + 12
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    parts: list[Any] = [
        CHAT[0],
        {"role": "user", "content": [{"type": "text", "text": "1 + 1 = ?"}]},
    ]
    again = server.client().chat.completions.create(messages=parts, **asked)
    assert again.choices[0].message.content == text and again.id != answer.id


def test_choices_are_different_and_counted(server: Server, source: Any) -> None:
    """Each is drawn with the next seed; a prompt counts once."""
    answer = server.client().chat.completions.create(
        model="tiny", messages=CHAT, n=3, seed=5, max_completion_tokens=8
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [expected(source, CHAT, max_new_tokens=8, seed=5 + i) for i in range(3)]
    assert len({*texts}) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == begin(source, Ask(CHAT)).num_prompt


def test_a_stream_has_the_same_text(server: Server, source: Any) -> None:
    """A role, then pieces, an end for each choice, and the tokens if they are asked for."""
    stream = server.client().chat.completions.create(
        model="tiny",
        messages=CHAT,
        n=2,
        seed=1,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts, ends = ["", ""], ["", ""]
    for part in chunks:
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    alone = [begin(source, Ask(CHAT, 9, seed=1 + i)) for i in range(2)]
    assert texts == ["".join(text for _, text in continue_all(source, [one])) for one in alone]
    assert ends == [one.finish for one in alone] == ["length", "stop"]
    assert [part.choices[0].delta.role for part in chunks[:2]] == ["assistant"] * 2
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None
    assert usage.completion_tokens == sum(one.num_made for one in alone)
    assert len({part.id for part in chunks}) == 1 and len(chunks) > 10


class Gated(TransformersSource):
    """Draws three tokens of a batch, and then waits for its gate."""

    def __init__(self, source: Any) -> None:
        super().__init__(source._model, source._tokenizer)
        self.gate, self.num_read = threading.Event(), 0

    def reader(self) -> Any:
        """Return a reader that waits."""
        own = super().reader()
        read = own.read

        def waits(texts: Any) -> Any:
            self.num_read += 1
            assert self.num_read < 4 or self.gate.wait(60)
            return read(texts)

        own.read = waits  # type: ignore[method-assign]
        return own


def test_a_stream_comes_as_it_is_made_and_ends_with_done(source: Any, tmp_path: Path) -> None:
    """The first pieces arrive before the last token is drawn; the last event is [DONE]."""
    slow = Gated(source)
    body = {"model": "m", "prompt": "ab", "max_tokens": 6, "temperature": 0, "stream": True}
    with (
        Server(TextService(slow, "m", 64, ServiceOptions()), tmp_path) as server,
        server.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        assert slow.num_read <= 4
        slow.gate.set()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and slow.num_read == 6
    assert response.headers["content-type"].startswith("text/event-stream")


def test_texts_are_continued(server: Server, source: Any) -> None:
    """Several prompts in one request, 16 tokens by default."""
    prompts = ["ab", "a longer one"]
    answer = server.client().completions.create(model="tiny", prompt=prompts, temperature=0)
    assert [choice.text for choice in answer.choices] == [
        expected(source, prompt, max_new_tokens=16, temperature=0) for prompt in prompts
    ]
    assert answer.usage is not None and answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == 14


def test_a_stop_ends_an_answer(server: Server, source: Any) -> None:
    """A text that ends it is not part of it, and the reason is stop; so is that of a token."""
    whole = expected(source, "ab", max_new_tokens=16, temperature=0)
    answer = server.client().completions.create(
        model="tiny", prompt="ab", temperature=0, stop=whole[5:8]
    )
    assert answer.choices[0].text == whole[: whole.index(whole[5:8])]
    assert answer.choices[0].finish_reason == "stop"


def test_requests_that_come_together_are_one_batch(source: Any, tmp_path: Path) -> None:
    """Of chats and texts, each with its own settings, each as it would be alone."""
    service = TextService(source, "tiny", 64, ServiceOptions(batch_wait_ms=500))
    made: dict[str, str] = {}
    with Server(service, tmp_path) as server:

        def ask(prompt: str, size: int) -> None:
            answer = server.client().completions.create(
                model="tiny", prompt=prompt, max_tokens=size, temperature=0
            )
            made[prompt] = answer.choices[0].text

        threads = [
            threading.Thread(target=ask, args=one) for one in (("ab", 5), ("xyz 12", 9), ("q", 3))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = server.http.get("/metrics").text
    for prompt, size in (("ab", 5), ("xyz 12", 9), ("q", 3)):
        assert made[prompt] == expected(source, prompt, max_new_tokens=size, temperature=0)
    assert "trainkit_batch_answers_sum 3" in metrics
    assert "trainkit_batch_answers_count 1" in metrics
    assert 'trainkit_tokens_total{of="completion"} 17' in metrics


def test_the_models_are_listed(server: Server) -> None:
    """There is one, by its name."""
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "trainkit"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("changed", "param", "said"),
    [
        ({"messages": []}, "messages", "a list of one message or more"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", '"robot"; it must'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "reads text alone",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages[0].tool_calls",
            "tool call 1: its arguments are a text that is not JSON",
        ),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages", "1 to 255"),
        ({"temperature": 3}, "temperature", "a number of 0 to 2"),
        ({"temperature": True}, "temperature", "a number of 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 65}, "max_tokens", "a whole number of 1 to 64"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "both given"),
        ({"n": 0}, "n", "a whole number of 1 to 128"),
        ({"seed": "x"}, "seed", "a whole number"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": list("abcde")}, "stop", "4 are the most"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream=true"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"extra_body": {"temprature": 1}}, "temprature", "Did you mean 'temperature'"),
    ],
)
def test_a_bad_request_is_refused(
    changed: dict[str, Any], param: str, said: str, server: Server
) -> None:
    """With OpenAI's error: the message, and the field that is wrong."""
    with pytest.raises(openai.BadRequestError) as error:
        server.client().chat.completions.create(
            **{"model": "tiny", "messages": CHAT, "max_tokens": 4} | changed
        )
    assert error.value.param == param and said in error.value.message
    assert error.value.type == "invalid_request_error"
    assert error.value.code == ("context_length_exceeded" if said == "1 to 255" else None)


def test_another_model_is_not_found(server: Server) -> None:
    """404, as at OpenAI."""
    with pytest.raises(openai.NotFoundError) as error:
        server.client().chat.completions.create(model="gpt-4o", messages=CHAT)
    assert error.value.code == "model_not_found"
    assert "'gpt-4o' does not exist; this server has 'tiny'" in error.value.message


def test_more_answers_than_may_wait_are_refused(server: Server) -> None:
    """A request that never fits is too large."""
    with pytest.raises(openai.APIStatusError) as error:
        server.client().chat.completions.create(model="tiny", messages=CHAT, n=9)
    assert error.value.status_code == 413 and "8 may wait" in error.value.message


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"{", "not JSON"), (b"[]", "a JSON object"), (b'{"n": NaN}', "NaN"), (b"{}", "model is")],
)
def test_a_body_that_is_not_a_request_is_refused(body: bytes, said: str, server: Server) -> None:
    """400 with an error object; another path and method say what there is."""
    answer = server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    absent = server.http.get("/v1/embeddings")
    assert absent.status_code == 404
    assert "There are POST /v1/chat/completions" in absent.json()["error"]["message"]


def test_fields_without_effect_are_taken(server: Server) -> None:
    """Clients send defaults, and labels for the server's books."""
    answer = server.client().chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=2,
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=False,
        user="me",
        response_format={"type": "text"},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(stream: bool, source: Any, tmp_path: Path) -> None:
    """No further token of it is drawn, and the next request is answered."""
    slow, begun = Gated(source), []
    service = TextService(slow, "tiny", 200, ServiceOptions(batch_wait_ms=0))
    own_begin = service._begin

    def noted(asked: Any) -> Any:
        begun.extend(own_begin(asked))
        return begun[-1:]

    service._begin = noted  # type: ignore[method-assign]
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 200, "temperature": 0, "stream": stream}
    with Server(service, tmp_path) as server:
        with (
            server.client_of_its_own() as http,
            contextlib.suppress(httpx.ReadTimeout),
            http.stream("POST", "/v1/completions", json=body, timeout=1) as response,
        ):
            next(response.iter_lines())
        end = time.monotonic() + 60
        while not begun[0].finish:
            assert time.monotonic() < end
            time.sleep(0.01)
        slow.gate.set()
        answer = server.client().completions.create(model="tiny", prompt="x", max_tokens=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    assert begun[0].finish == "left" and slow.num_read <= 5


def test_an_error_of_the_model_is_its_requests(source: Any, tmp_path: Path) -> None:
    """500 or, in a stream, an error event; the next request is answered."""
    broken = [True]

    class Breaks(TransformersSource):
        def reader(self) -> Any:
            if broken[0]:
                raise ValueError("out of memory")
            return super().reader()

    breaks = Breaks(source._model, source._tokenizer)
    with Server(TextService(breaks, "tiny", 64, ServiceOptions()), tmp_path) as server:
        client = server.client()
        with pytest.raises(openai.InternalServerError, match="The service failed: ValueError"):
            client.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.APIError, match="The service failed: ValueError"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
        broken[0] = False
        assert client.completions.create(model="tiny", prompt="x").choices[0].text


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    """A model of texts alone refuses them, and continues texts."""
    source = tiny()
    source._tokenizer.chat_template = None
    with Server(TextService(source, "tiny", 64, ServiceOptions()), tmp_path) as server:
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            server.client().chat.completions.create(model="tiny", messages=CHAT)
        assert server.client().completions.create(model="tiny", prompt="x").choices[0].text


def test_arguments_of_a_call_are_an_object() -> None:
    """As chat templates read them; a text would be written as a string."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    body = json.dumps({"model": "tiny", "messages": [message]}).encode()
    (read,) = read_chat(body, "tiny", 4).asks[0].prompt
    assert isinstance(read, dict)
    assert read["tool_calls"] == [{"id": "1", "function": function | {"arguments": {"a": 1}}}]


def test_a_draw_without_a_seed_is_new() -> None:
    """As at OpenAI."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    seeds = {read_chat(body, "m", 9).asks[0].seed for _ in range(3)}
    assert len(seeds) == 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs: a chat model, a model of bytes, and one of pictures."""
    folder = tmp_path_factory.mktemp("runs")
    small = {
        "chat": ["conf=sft"],
        "gpt": ["conf=gpt", "task.model.width=16", "task.model.depth=1", "data.context=8"],
        "mlp": ["conf=mlp"],
    }
    for name, settings in small.items():
        more = [f"run_dir={folder / name}", "trainer.max_steps=1", "logger=none"]
        assert fit("fit", [*settings, *more]) == 0
    return folder


def test_a_run_and_what_it_left_are_served(runs: Path) -> None:
    """Its best checkpoint, or a folder of transformers: the same answer of both, by their names."""
    run = open_text_model(str(runs / "chat"), None, [])
    left = open_text_model(str(runs / "chat" / "pretrained"), None, [])
    assert (run.name, left.name) == ("chat", "pretrained")
    for model in (run, left):
        assert expected(model.source, CHAT, max_new_tokens=5, temperature=0) == expected(
            run.source, CHAT, max_new_tokens=5, temperature=0
        )
    texts = open_text_model(str(runs / "gpt"), None, [])
    one = begin(texts.source, Ask("ab", 4, temperature=0))
    assert len([*continue_all(texts.source, [one])]) <= 4
    with pytest.raises(ConfigError, match="The model has no chat template: it continues texts"):
        begin(texts.source, Ask(CHAT))
    with pytest.raises(TaskError, match=r"ImageClassifier has no text_source\(\)"):
        open_text_model(str(runs / "mlp"), None, [])
    with pytest.raises(ConfigError, match="is neither a run .* nor a folder of transformers"):
        open_text_model(str(runs), None, [])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["api=chat"], "api is 'chat'; it must be one of predict, openai"),
        (["max_new_tokens=5"], "max_new_tokens is 5, which has no effect without api=openai"),
        (["tokenizer=x"], "tokenizer is x, which has no effect without api=openai"),
        (["api=openai", "backend=ray"], "api=openai answers in one process"),
        (["api=openai", "replicas=2"], "replicas is 2; api=openai answers in one process"),
        (["api=openai", "max_new_tokens=0"], "max_new_tokens is '0'"),
        (["api=openai"], "absent is neither a run"),
    ],
)
def test_a_wrong_command_is_explained(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what is legal."""
    assert command.main("serve", ["absent", *typed]) == 2
    assert said in capsys.readouterr().err
