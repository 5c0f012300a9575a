"""A served export: its answers are the Task's, requests that come together become a batch,
bad input is answered in words.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.helpers.toy import Line
from trainkit.errors import ConfigError
from trainkit.extensions.exporting.description import InputTensor, path_of, read_description
from trainkit.extensions.exporting.export import export
from trainkit.extensions.serving.app import Service, ServiceOptions
from trainkit.extensions.serving.body import RequestError
from trainkit.extensions.serving.model import _rows

ABOUT = {
    "image": {"resize": 10, "crop": 8, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)},
    "classes": ["cat", "dog", "owl"],
}
PIXELS = torch.zeros(3, 8, 8).tolist()


class Small(Line):
    """Pictures [3, 8, 8] to three scores."""

    def make_model(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


class Words(Line):
    """Five numbers of tokens to an embedding's mean."""

    def make_model(self) -> nn.Module:
        """Return the model."""
        return nn.Embedding(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean."""
        return self.model(x).mean(1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Small, Path]:
    """A Task, and its export with a description."""
    path, task = tmp_path_factory.mktemp("export") / "small.pt2", Small()
    export(task, path, "torch_export", torch.randn(2, 3, 8, 8), about=ABOUT)
    return task.eval(), path


def ask(service: Service, *requests: tuple[str, str, str, bytes]) -> list[tuple[int, Any]]:
    """Send (method, path, content type, body) to an app at the same time;
    return status and JSON (or text) of each answer.
    """
    app = service.app()

    async def one(method: str, path: str, kind: str, body: bytes) -> tuple[int, Any]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-type", kind.encode()), (b"host", b"here")]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        await app(
            {**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send
        )  # type: ignore[arg-type]
        text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
        return sent[0]["status"], text if path == "/metrics" else json.loads(text)

    async def all_of_them() -> list[tuple[int, Any]]:
        waits: list[Awaitable[tuple[int, Any]]] = [one(*request) for request in requests]
        return list(await asyncio.gather(*waits))

    return asyncio.run(all_of_them())


def predict(service: Service, body: Any) -> tuple[int, Any]:
    """Send JSON (or bytes, as they are) to /predict."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(service, ("POST", "/predict", "application/json", data))[0]


def picture(kind: str = "PNG", size: tuple[int, int] = (20, 12)) -> bytes:
    """Return a picture of noise."""
    pixels = torch.randint(
        0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, kind)
    return file.getvalue()


def test_requests_that_come_together_are_one_batch(exported: tuple[Small, Path]) -> None:
    """Seven samples in five requests are answered by one call, each as the Task answers it."""
    task, path = exported
    inputs = torch.randn(7, 3, 8, 8)
    bodies = [inputs[0], inputs[1:3], inputs[3], inputs[4:6], inputs[6]]
    service = Service(path, ServiceOptions(batch_wait_ms=300))
    requests = [
        ("POST", "/predict", "application/json", json.dumps({"inputs": x.tolist()}).encode())
        for x in bodies
    ]
    answers = ask(service, *requests)
    assert [status for status, _ in answers] == [200] * 5
    found = [one for _, answer in answers for one in answer["predictions"]]
    expected = task(inputs).detach()
    torch.testing.assert_close(torch.tensor([one["output"] for one in found]), expected)
    assert [one["class"] for one in found] == [ABOUT["classes"][int(i)] for i in expected.argmax(1)]  # type: ignore[index]
    metrics = ask(service, ("GET", "/metrics", "", b""))[0][1]
    assert (
        "trainkit_batch_samples_sum 7\n# " not in metrics
        and "trainkit_batch_samples_count 1" in metrics
    )
    assert 'trainkit_requests_total{code="200"} 5' in metrics


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_is_transformed_as_in_validation(kind: str, exported: tuple[Small, Path]) -> None:
    """Resize, centre crop and normalisation are those of the recipe's validation."""
    from torchvision.transforms import v2

    from recipes.augment import Augment
    from recipes.photographs import load_image

    task, path = exported
    file = path.parent / f"a.{kind.lower()}"
    file.write_bytes(picture(kind))
    about: dict[str, Any] = ABOUT["image"]  # type: ignore[assignment]
    transform = v2.Compose(
        [*Augment(test_crop_ratio=0.8).of_validation(8), v2.ToDtype(torch.float32, scale=True)]
    )
    image = v2.functional.normalize(transform(load_image(str(file))), about["mean"], about["std"])
    content = f"image/{kind.lower()}"
    ((status, answer),) = ask(
        Service(path, ServiceOptions()), ("POST", "/predict", content, file.read_bytes())
    )
    assert status == 200
    torch.testing.assert_close(
        torch.tensor(answer["predictions"][0]["output"]), task(image[None])[0].detach()
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "The body is no JSON"),
        (b"[" * 100_000, "The body is no JSON"),
        (b'{"inputs": NaN}', "NaN is not a number of JSON"),
        ({"input": 1}, 'The body must be {"inputs": ...}'),
        ({"inputs": [[1, 2], [3]]}, "no array of numbers of equal lengths"),
        ({"inputs": "text"}, "no array of numbers"),
        ({"inputs": [1, 2]}, "inputs has shape [2]; a sample is [3, 8, 8] of float32"),
        ({"inputs": 1}, "inputs has shape []"),
        ({"inputs": []}, "inputs has shape [0]"),
        (
            b'{"inputs": %s}' % json.dumps(PIXELS).replace("0.0", "1e400", 1).encode(),
            "numbers beyond the range of float32",
        ),
        (
            b'{"inputs": %s}' % json.dumps(PIXELS).replace("0.0", "1e39", 1).encode(),
            "numbers beyond the range of float32",
        ),
        (
            b'{"inputs": %s}' % json.dumps(PIXELS).replace("0.0", "3e38").encode(),
            "output for this input has NaN or Inf",
        ),
    ],
)
def test_bad_json_is_answered_with_400(
    body: Any, message: str, exported: tuple[Small, Path]
) -> None:
    """Each mistake is named, with what a sample is."""
    status, answer = predict(Service(exported[1], ServiceOptions()), body)
    assert status == 400 and message in answer["error"]


def test_other_refusals(exported: tuple[Small, Path]) -> None:
    """A wrong content type is 415, a large body 413, a broken picture 400, an unknown path 404,
    a wrong method 405.
    """
    service = Service(exported[1], ServiceOptions(max_body_mb=0.001))
    answers = ask(
        service,
        ("POST", "/predict", "text/plain", b"hello"),
        ("POST", "/predict", "application/json", b" " * 2000),
        ("POST", "/predict", "image/jpeg", picture("JPEG")[:200]),
        ("POST", "/predict", "image/jpeg", b"no picture"),
        ("GET", "/other", "", b""),
        ("GET", "/predict", "", b""),
    )
    assert [status for status, _ in answers] == [415, 413, 400, 400, 404, 405]
    assert all(set(answer) == {"error"} for _, answer in answers)


def test_too_many_waiting_samples_are_refused(exported: tuple[Small, Path]) -> None:
    """A queue that is full answers 503 and does not grow;
    a request that is too large for an empty one is 413.
    """
    service = Service(exported[1], ServiceOptions(max_waiting=2))
    bodies = [
        json.dumps({"inputs": torch.zeros(number, 3, 8, 8).tolist()}).encode()
        for number in (3, 2, 1)
    ]
    too_large, answered, too_late = ask(
        service, *[("POST", "/predict", "application/json", body) for body in bodies]
    )
    assert (
        too_large[0] == 413 and "3 samples, and 2 may wait (max_waiting)" in too_large[1]["error"]
    )
    assert answered[0] == 200
    assert too_late[0] == 503 and "Try again later" in too_late[1]["error"]


@pytest.mark.parametrize(
    ("dtype", "number"), [("float16", 70_000), ("uint8", 300), ("uint8", -1), ("int32", 2**31)]
)
def test_a_number_beyond_the_dtype_is_refused(dtype: str, number: int) -> None:
    """It neither becomes Inf nor another number."""
    with pytest.raises(
        RequestError, match=f"inputs has numbers beyond the range of {dtype}"
    ) as refused:
        _rows([[number, 1]], InputTensor((2,), dtype))
    assert refused.value.status == 400


def test_a_float64_is_not_rounded() -> None:
    """A model of float64 gets the numbers of the request,
    also those that float32 has no place for.
    """
    assert _rows([0.1, 1e300], InputTensor((2,), "float64")).tolist() == [[0.1, 1e300]]


def test_a_sample_that_the_model_refuses_is_not_its_neighbours_fault(tmp_path: Path) -> None:
    """A token out of range is 400; the request beside it, in the same batch, is answered."""
    path, task = tmp_path / "words.pt2", Words()
    export(task, path, "torch_export", torch.zeros(2, 5, dtype=torch.int64))
    service = Service(path, ServiceOptions(batch_wait_ms=300))
    bodies = [{"inputs": [99] * 5}, {"inputs": [1] * 5}, {"inputs": [0.5] * 5}]
    answers = ask(
        service,
        *[("POST", "/predict", "application/json", json.dumps(body).encode()) for body in bodies],
    )
    assert [status for status, _ in answers] == [400, 200, 400]
    assert "The model refuses this input" in answers[0][1]["error"]
    assert "int64" in answers[2][1]["error"]
    status = ask(service, ("POST", "/predict", "image/jpeg", picture("JPEG")))[0][0]
    assert status == 415  # its export does not say how a picture becomes an input


def test_a_file_without_its_description_is_refused(
    exported: tuple[Small, Path], tmp_path: Path
) -> None:
    """What cannot be served is refused before anything listens."""
    copy = tmp_path / "copy.pt2"
    copy.write_bytes(exported[1].read_bytes())
    with pytest.raises(ConfigError, match="no description copy.predict.json beside it"):
        Service(copy, ServiceOptions())
    path_of(copy).write_text("{}")
    with pytest.raises(ConfigError, match="is no description of an export"):
        Service(copy, ServiceOptions())
    path_of(copy).write_text(path_of(exported[1]).read_text())
    copy.write_bytes(b"not a program")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Service(copy, ServiceOptions())
    with pytest.raises(ConfigError, match="must be a .pt2 or .onnx file"):
        Service(tmp_path / "a.safetensors", ServiceOptions())


def test_the_description_says_what_the_input_is(exported: tuple[Small, Path]) -> None:
    """Shape, dtype, picture and classes are read back as they were written."""
    found = read_description(exported[1])
    assert (found.inputs[0].shape, found.inputs[0].dtype, found.batch_size) == (
        (3, 8, 8),
        "float32",
        None,
    )
    assert found.image is not None and found.image.crop == 8
    assert found.classes == ("cat", "dog", "owl")
    service = Service(exported[1], ServiceOptions())
    answers = ask(service, ("GET", "/", "", b""), ("GET", "/health", "", b""))
    assert answers[0][1]["inputs"] == [{"shape": [3, 8, 8], "dtype": "float32", "has_rows": True}]
    assert answers[1] == (200, {"status": "ok", "file": "small.pt2"})
