"""A stand-in for the hub of models on 127.0.0.1: it takes what huggingface_hub uploads, small files
within the commit and weights by Git LFS, and refuses what it is set to refuse.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_S3CRETofTheTestsOfPushToHub"


@dataclass
class ModelHub:
    """What the server has.

    Attributes:
        address: of the server.
        repos: name -> whether it is private.
        files: "name/path" -> content, of all commits.
        messages: of the commits.
        refused: the status of each answer, 0 to serve.
        tokens: those that came.
    """

    address: str = ""
    repos: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refused: int = 0
    tokens: set[str] = field(default_factory=set)
    large: dict[str, bytes] = field(default_factory=dict)


@contextlib.contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Serve; yield what the server has."""
    hub = ModelHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler_of(hub: ModelHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            """Answer what a repository is."""
            self._answer(b"")

        def do_POST(self) -> None:
            """Take a repository, a commit, or what leads to it."""
            self._answer(self._body())

        def do_PUT(self) -> None:
            """Take a large file."""
            self._answer(self._body())

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def _answer(self, body: bytes) -> None:
            hub.tokens.add(self.headers.get("authorization", "").removeprefix("Bearer "))
            status, content = 200, {}
            if hub.refused:
                # as a careless proxy would
                status, content = hub.refused, {"error": f"refused {self.headers['authorization']}"}
            else:
                status, content = _served(hub, self.command, self.path, body)
            text = json.dumps(content).encode()
            self.send_response(status)
            if status >= 400:
                self.send_header("x-error-message", content["error"])
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def _served(hub: ModelHub, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    path = path.partition("?")[0]
    if method == "PUT":
        hub.large[path.rpartition("/")[2]] = body
        return 200, {}
    if path == "/api/repos/create":
        return _created(hub, json.loads(body))
    if path == "/api/validate-yaml":
        header = yaml.safe_load(json.loads(body)["content"].split("---")[1])
        assert isinstance(header, dict)
        return 200, {"errors": [], "warnings": []}
    name = "/".join(path.removeprefix("/api/models").split("/")[1:3]).removesuffix(".git")
    if path.endswith("/preupload/main"):
        kinds = {True: "lfs", False: "regular"}
        files = [
            {"path": f["path"], "uploadMode": kinds[f["path"].endswith(".safetensors")]}
            | {"shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        return 200, {"files": files}
    if path.endswith("/info/lfs/objects/batch"):
        upload = f"{hub.address}/large"
        objects = [
            one | {"actions": {"upload": {"href": f"{upload}/{one['oid']}"}}}
            for one in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    if path.endswith("/commit/main"):
        return _committed(hub, name, body)
    if name in hub.repos:
        return 200, {"id": name, "private": hub.repos[name], "siblings": []}
    return 404, {"error": "Repository not found"}


def _created(hub: ModelHub, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    name = (
        f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
    )
    content = {"url": f"{hub.address}/{name}", "name": name, "id": name}
    if name in hub.repos:
        return 409, content | {"error": "You already created this model repo"}
    is_private = asked.get("private") or asked.get("visibility") == "private"
    hub.repos[name] = bool(is_private)
    return 200, content


def _committed(hub: ModelHub, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            hub.messages.append(value["summary"])
        elif entry["key"] == "file":
            hub.files[f"{name}/{value['path']}"] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            content = hub.large[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            hub.files[f"{name}/{value['path']}"] = content
    commit = {"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": "1" * 40, "success": True}
    return 200, commit
