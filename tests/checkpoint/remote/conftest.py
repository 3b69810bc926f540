"""A real S3-compatible server for these tests, which start it, make it fail, and kill it by its process id."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BOUND_S = 60.0
BUCKET = "runs"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

HEADERS = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request",
    "Content-Type": "application/octet-stream",
}


class Servers:
    """The program that starts servers; importing moto takes it a second, once."""

    def __init__(self) -> None:
        program = [sys.executable, str(Path(__file__).with_name("server.py"))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        ready, _, _ = select.select([self._process.stdout], [], [], BOUND_S)
        line = self._process.stdout.readline() if ready else b""
        answer: dict[str, Any] = json.loads(line or b'{"error": "the program that starts servers does not answer"}')
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(BOUND_S)
        finally:
            self._process.kill()
            self._process.wait(BOUND_S)


class Store:
    """One server, and its content, read without the code under test.

    Attributes:
        url: a directory of checkpoints in it.
        pid: of the server.
    """

    def __init__(self, servers: Servers, disk: Path) -> None:
        self._servers = servers
        self._disk = disk
        self._port = 0
        self.pid = 0
        self.start()
        self.request("PUT", f"/{BUCKET}")
        self.url = f"s3://{BUCKET}/gpt/first"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to know to use it."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}

    def start(self) -> None:
        """Start it, or start it again: same port, and everything that it had acknowledged."""
        shown = self._servers.ask(do="start", port=self._port, disk=str(self._disk))
        self.pid, self._port = shown["pid"], shown["port"]

    def kill(self) -> None:
        if self.pid:
            self._servers.ask(do="kill", pid=self.pid)
            self.pid = 0

    def died(self) -> None:
        """Return when it has killed itself."""
        self._servers.ask(do="wait", pid=self.pid)
        self.pid = 0

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        asked = urllib.request.Request(self.endpoint + path, body, HEADERS, method=method)
        with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
            content: bytes = answer.read()
        return content

    def fail(self, *faults: dict[str, Any]) -> None:
        """Set the faults, replacing those before; see ``server.py``."""
        self.request("POST", "/_faults", json.dumps(faults).encode())

    def hit(self) -> None:
        """Return when a request has met with one of the faults; not for one that kills the server."""
        self.request("GET", "/_hit")

    def seen(self) -> list[tuple[str, str, str]]:
        """Method, path and query of every request so far."""
        return [(method, path, query) for method, path, query in json.loads(self.request("GET", "/_seen"))]

    def objects(self) -> list[str]:
        """The keys of all objects in the bucket."""
        found = self.request("GET", f"/{BUCKET}?list-type=2&max-keys=1000").decode()
        return sorted(urllib.parse.unquote(key) for key in re.findall("<Key>(.*?)</Key>", found))

    def names(self) -> list[str]:
        """The keys below :attr:`url`, without what they have in common."""
        below = self.url.removeprefix(f"s3://{BUCKET}/") + "/"
        return [key.removeprefix(below) for key in self.objects() if key.startswith(below)]

    def uploads(self) -> list[str]:
        """The keys of all multipart uploads that were begun and neither completed nor aborted."""
        found = self.request("GET", f"/{BUCKET}?uploads").decode()
        return sorted(re.findall("<Key>(.*?)</Key>", found))

    def read(self, key: str) -> bytes:
        return self.request("GET", f"/{BUCKET}/{urllib.parse.quote(key)}")

    def write(self, key: str, content: bytes) -> None:
        self.request("PUT", f"/{BUCKET}/{urllib.parse.quote(key)}", content)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    for package in ("moto", "flask", "s3fs"):
        pytest.importorskip(package)
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def store(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server with an empty bucket, set in this process's environment."""
    import s3fs

    store = Store(servers, tmp_path / "disk")
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    # What fsspec keeps of a file system does not know that the environment is another one.
    s3fs.S3FileSystem.clear_instance_cache()
    yield store
    s3fs.S3FileSystem.clear_instance_cache()
    store.kill()
