"""What a client reads of a failure of the server: memory that is short, and a dead device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.extensions.serving.letters import Letters
from tests.extensions.serving.test_app import ask, predict
from tests.helpers.toy import Line
from trainkit.extensions.exporting.export import export
from trainkit.extensions.serving.app import Service, ServiceOptions
from trainkit.extensions.serving.failures import is_of_device
from trainkit.extensions.serving.openai_app import TextService
from trainkit.extensions.serving.serve import _Replica

HEALTH = ("GET", "/health", "", b"")
SAMPLE = {"inputs": [1.0, 2.0, 3.0]}
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]
DEAD_DEVICE = [
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to serve."""
    path = tmp_path_factory.mktemp("export") / "line.pt2"
    export(Line(), path, "torch_export", torch.zeros(2, 3))
    return path


def service_of(path: Path, forward: Callable[[Tensor], Tensor]) -> Service:
    """Return a service with another forward."""
    service = Service(path, ServiceOptions(batch_wait_ms=300, max_batch_size=2))
    service.model._forward = forward
    return service


def client_of(service: Service | TextService) -> httpx.AsyncClient:
    """Return a client of a service, in one event loop."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(service.app()), base_url="http://here", timeout=20
    )


def failing(error: Exception, calls: list[int]) -> Callable[[Tensor], Tensor]:
    """Return a forward that fails."""

    def forward(x: Tensor) -> Tensor:
        calls.append(len(x))
        raise error

    return forward


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_short_memory_is_not_the_input(error: Exception, path: Path) -> None:
    """503, so that a client tries again, and the service stays."""
    service = service_of(path, failing(error, []))
    status, answer = predict(service, SAMPLE)
    assert status == 503 and "too little memory" in answer["error"]
    assert ask(service, HEALTH)[0][0] == 200


def test_a_batch_without_memory_is_answered_in_parts(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request by itself, with a line in the log."""

    def forward(x: Tensor) -> Tensor:
        if len(x) > 1:
            raise NO_MEMORY[0]
        return x

    body = json.dumps(SAMPLE).encode()
    requests = [("POST", "/predict", "application/json", body)] * 2
    answers = ask(service_of(path, forward), *requests)
    assert [status for status, _ in answers] == [200, 200]
    assert "Out of memory in a call of 2 samples: CUDA out of memory" in caplog.text


@pytest.mark.parametrize("error", DEAD_DEVICE, ids=lambda error: type(error).__name__)
def test_a_dead_device_ends_the_health(
    error: Exception, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """500 and one line in the log; later requests do not call the model."""
    calls: list[int] = []

    async def talk() -> list[httpx.Response]:
        async with client_of(service_of(path, failing(error, calls))) as client:
            asked = [await client.post("/predict", json=SAMPLE) for _ in range(2)]
            return [*asked, await client.get("/health")]

    *asked, health = asyncio.run(talk())
    for answer in asked:
        assert answer.status_code == 500
        assert "device has failed (CUDA error" in answer.json()["error"]
    assert calls == [1] and caplog.text.count("device has failed") == 1
    assert health.status_code == 503 and health.json()["status"] == "failed"
    assert "Restart" in health.json()["error"]


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("index out of range")])
def test_other_errors_are_the_inputs(error: Exception, path: Path) -> None:
    """400, as before; the health is good."""
    service = service_of(path, failing(error, []))
    status, answer = predict(service, SAMPLE)
    assert status == 400 and "The model refuses this input" in answer["error"]
    assert ask(service, HEALTH)[0][0] == 200


@pytest.mark.parametrize(
    ("error", "status", "health"),
    [(NO_MEMORY[0], 503, 200), (DEAD_DEVICE[0], 500, 503), (ValueError("x"), 500, 200)],
    ids=lambda value: type(value).__name__,
)
def test_texts_tell_them_apart_too(error: Exception, status: int, health: int) -> None:
    """The same of api=openai."""

    def fails(ids: list[int]) -> Tensor:
        raise error

    async def talk() -> tuple[int, Any, int]:
        service = TextService(Letters(fails), "m", 8, ServiceOptions())
        async with client_of(service) as client:
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
            return answer.status_code, answer.json(), (await client.get("/health")).status_code

    found, answer, found_health = asyncio.run(talk())
    assert (found, found_health) == (status, health)
    assert answer["error"]["type"] == "server_error"


def test_ray_replaces_a_replica_whose_device_has_failed(path: Path) -> None:
    """Its health check, which Ray asks, raises then, and not for a request that is refused."""
    for error, is_dead in ((ValueError("x"), False), (DEAD_DEVICE[0], True)):
        service, replica = service_of(path, failing(error, [])), _Replica()
        replica.app = service.app()
        predict(service, SAMPLE)
        with pytest.raises(RuntimeError, match="device has failed") if is_dead else nullcontext():
            replica.check_health()


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`",
        "CUDA error: invalid configuration argument",
    ],
)
def test_an_error_of_one_call_does_not_end_the_service(text: str) -> None:
    """The device works after it: an odd shape of one input is enough."""
    assert not is_of_device(torch.AcceleratorError(text))
    assert not is_of_device(RuntimeError(text))
