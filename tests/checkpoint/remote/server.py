"""An S3-compatible server that tests may kill: moto's, with faults on request and with a disk.

``python server.py`` imports moto once and then carries out requests on its standard input, one line of JSON each, and
answers each by a line: it forks a server that listens (``start``), kills one (``kill``), or waits until one has died
(``wait``). At the end of its input it kills its servers and ends.

A server takes its faults over HTTP (``POST /_faults``), reports when a request has met with a fault
(``GET /_hit``), and lists what was requested (``GET /_seen``). With a disk, which is one file, everything it has
acknowledged is there again when another server starts with that file; moto alone forgets everything.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

ACCOUNT, PARTITION = "123456789012", "aws"
BOUND_S = 60.0


class Faulty:
    """moto's application behind faults and a disk.

    A fault is a dict: ``method`` and ``contains`` select the requests (a part of path and query), ``after`` how many
    of those pass first, ``times`` how many are hit, and ``do`` what happens to them:

    * ``refuse``: they are answered with the status ``status`` and do nothing;
    * ``die``: half of the body is read, and the server kills itself;
    * ``cut``: half of the body is read, and the connection is closed;
    * ``lose``: they are carried out, and the connection is closed before the answer;
    * ``hang``: they are not answered before the faults are cleared, or a minute has passed.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], disk: Path | None) -> None:
        self._app = app
        self._disk = disk
        self._lock = threading.Lock()
        self._faults: list[dict[str, Any]] = []
        self._seen: list[list[str]] = []
        self._cleared = threading.Event()
        self._met = threading.Event()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if path == "/_faults":
            self._cleared.set()
            self._cleared, self._met = threading.Event(), threading.Event()
            self._faults = json.loads(environ["wsgi.input"].read(length))
            start_response("204 No Content", [])
            return []
        if path == "/_hit":
            start_response("204 No Content" if self._met.wait(BOUND_S) else "408 Nothing Was Hit", [])
            return []
        if path == "/_seen":
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._seen).encode()]
        with self._lock:
            self._seen.append([method, path, query])
            fault = self._hit(method, f"{path}?{query}")
        if fault is not None:
            self._met.set()
            what = fault["do"]
            if what in ("die", "cut"):
                environ["wsgi.input"].read(length // 2)
                if what == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                self._hang_up(environ)
            if what == "refuse":
                environ["wsgi.input"].read(length)
                code = fault.get("code", "SlowDown")
                body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by request</Message></Error>"
                start_response(f"{fault['status']} Refused", [("Content-Type", "application/xml")])
                return [body.encode()]
            if what == "hang":
                self._cleared.wait(BOUND_S)
        # All of it before the answer: what is acknowledged is on the disk.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length)) if length else environ["wsgi.input"]
        answer = list(self._app(environ, start_response))
        if self._disk is not None and method in ("PUT", "POST", "DELETE"):
            with self._lock:
                _keep(self._disk)
        if fault is not None and fault["do"] == "lose":
            self._hang_up(environ)
        return answer

    def _hang_up(self, environ: dict[str, Any]) -> NoReturn:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # which is kept for the next request otherwise
        raise ConnectionAbortedError

    def _hit(self, method: str, asked: str) -> dict[str, Any] | None:
        for fault in self._faults:
            if fault.get("method", method) != method or fault.get("contains", "") not in asked:
                continue
            if fault.get("after", 0) > 0:
                fault["after"] -= 1
            elif fault.get("times", 1) > 0:
                fault["times"] = fault.get("times", 1) - 1
                return fault
        return None


def _buckets() -> Any:
    from moto.s3.models import s3_backends

    return s3_backends[ACCOUNT][PARTITION].buckets


def _keep(disk: Path) -> None:
    beside = disk.with_suffix(".new")
    beside.write_bytes(pickle.dumps(dict(_buckets())))
    beside.replace(disk)


def serve(app: Any, port: int, disk: Path | None, report: int) -> None:
    """Listen, write the port to ``report``, and never return."""
    import logging

    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    if disk is not None and disk.exists():
        _buckets().update(pickle.loads(disk.read_bytes()))
    server = make_server("127.0.0.1", port, Faulty(app, disk), threaded=True, request_handler=MotoRequestHandler)
    os.write(report, str(server.port).encode())
    os.close(report)
    server.serve_forever()


def start(app: Any, port: int, disk: str | None) -> dict[str, Any]:
    """Fork a server. Forking is harmless here: this process has one thread."""
    end, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            serve(app, port, None if disk is None else Path(disk), report)
        finally:
            os._exit(1)
    os.close(report)
    with open(end, "rb") as reported:
        listening = reported.read()
    return {"pid": pid, "port": int(listening)} if listening else {"pid": pid, "error": f"nothing listens at {port}"}


def ended(pid: int) -> dict[str, Any]:
    """Wait for the end of a server, within bounds."""
    alive = os.pidfd_open(pid)
    over, _, _ = select.select([alive], [], [], BOUND_S)
    os.close(alive)
    if not over:
        return {"error": f"process {pid} lives"}
    return {"status": os.waitpid(pid, 0)[1]}


def main() -> None:
    """Carry out the requests on standard input."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.test import Client

    app = DomainDispatcherApplication(create_backend_app)
    Client(app).get("/", base_url="http://s3.amazonaws.com")  # imports what it needs, before the fork
    running: set[int] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "start":
            answer = start(app, asked["port"], asked["disk"])
            running.add(answer["pid"])
        else:
            pid = asked["pid"]
            if asked["do"] == "kill":
                os.kill(pid, signal.SIGKILL)
            answer = ended(pid)
            running.discard(pid)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
