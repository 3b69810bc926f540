"""An S3-compatible server for these tests: moto's, on a thread, with faults on request."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
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


class Server:
    """moto's application behind faults.

    A fault is a dict: ``method`` and ``contains`` select the requests (a part of path and query), ``times`` how many of
    them are hit, and ``do`` what happens to them:

    * ``refuse``: they are answered with the status ``status`` and the code ``code``, and do nothing;
    * ``lose``: they are carried out, and the connection is closed before the answer.

    Attributes:
        endpoint: its URL.
        seen: method, path and query of every request.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.seen: list[tuple[str, str, str]] = []
        self.fail()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=MotoRequestHandler)
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def fail(self, *faults: dict[str, Any]) -> None:
        """Set the faults, replacing those before."""
        with self._lock:
            self._met = threading.Event()
            self._faults = [{"times": 1, **fault} for fault in faults]

    def hit(self) -> None:
        """Return when a request has met with one of the faults."""
        assert self._met.wait(BOUND_S)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        length = int(environ.get("CONTENT_LENGTH") or 0)
        with self._lock:
            self.seen.append((method, path, query))
            fault = self._next_fault(method, f"{path}?{query}")
        do = fault.get("do")
        if do:
            self._met.set()
        body = environ["wsgi.input"].read(length)
        if do == "refuse":
            start_response(f"{fault['status']} Refused", [("Content-Type", "application/xml")])
            code = fault.get("code", "SlowDown")
            return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by request</Message></Error>".encode()]
        environ["wsgi.input"] = io.BytesIO(body) if length else environ["wsgi.input"]
        answer = list(self._app(environ, start_response))
        if do == "lose":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # which is kept for the next request otherwise
            raise ConnectionAbortedError
        return answer

    def _next_fault(self, method: str, asked: str) -> dict[str, Any]:
        for fault in self._faults:
            if fault["times"] and fault.get("method", method) == method and fault.get("contains", "") in asked:
                fault["times"] -= 1
                return fault
        return {}


class Store:
    """An empty bucket, and its content, read without the code under test.

    Attributes:
        url: a directory of checkpoints in it.
        server: has the faults.
        client: for other requests.
    """

    url = f"s3://{BUCKET}/gpt/first"

    def __init__(self, server: Server) -> None:
        import boto3
        import requests

        self.server, self.client = server, boto3.client("s3", endpoint_url=server.endpoint)
        requests.post(f"{server.endpoint}/moto-api/reset", timeout=BOUND_S)
        self.client.create_bucket(Bucket=BUCKET)

    def objects(self) -> list[str]:
        """The keys of all objects in the bucket."""
        return sorted(found["Key"] for found in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", []))

    def names(self) -> list[str]:
        """The keys below :attr:`url`, without what they have in common."""
        below = self.url.removeprefix(f"s3://{BUCKET}/") + "/"
        return [key.removeprefix(below) for key in self.objects() if key.startswith(below)]

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    for package in ("moto", "flask", "s3fs"):
        pytest.importorskip(package)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket, set in this process's environment."""
    import s3fs

    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server.endpoint}.items():
        monkeypatch.setenv(name, value)
    # What fsspec keeps of a file system does not know that the environment is another one.
    s3fs.S3FileSystem.clear_instance_cache()
    yield Store(server)
    server.fail()
    s3fs.S3FileSystem.clear_instance_cache()
