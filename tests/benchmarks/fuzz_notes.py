"""Two kinds of inputs of ``make fuzz`` that lie beside checkpoints: small files, and what comes over the network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stagereg
import stagereg.extensions.recovery.heartbeat as pulse
import stagereg.extensions.tiers.wire as wire
from stagereg.base.overrides import Identity  # noqa: F401  imported with the rest, before the reading
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.store.lease import LeaseRecord
from stagereg.checkpoint.store.lock import Owner
from stagereg.extensions.tiers.part import Part, PartFile
from stagereg.extensions.tiers.peer import Peer
from stagereg.sweep.plan import Plan, PlannedJob
from tests.support import samples, tier_parts

from .fuzz import PRIVATE
from .fuzz_inputs import (
    DATA,
    Action,
    Files,
    Kind,
    Manifests,
    Wrong,
    checkpointer,
    command,
    files_of,
    lay,
    state,
)
from .mutations import TEXTS, Random, mutate_bytes, mutate_json

_RUN, _SECRET = tier_parts.RUN, "the secret"
_WAIT_S = 5.0


class Notes(Manifests):
    """Every small file beside checkpoints, in a tier, and in the folder of a run or of a sweep."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        crashes = {"restored": "step-00000002", "max_crashes": 3, "crashes": {"step-00000001": 1}, "in_a_row": 1}
        crashes |= {"reached": 1, "newest": 2, "number": 4, "run": "abcd", "failures": ["ValueError train.py:3"]}
        lineage = {"run": _RUN, "branches": [[1, -1, 0], [2, 1, 1]]}
        notes: dict[str, Any] = {
            "kept.json": {"step-00000001": "every 4"},
            ".restored.json": crashes,
            ".run.json": lineage,
        }
        notes |= {".sweep-job.json": {"sweep": "/sweep", "job": 1, "combination": "a=1"}, "metrics.json": {"loss": 0.5}}
        owner = Owner(4711, "elsewhere", 1.7e9, "python train.py")
        notes[".lock"] = vars(owner)
        self.notes = {name: json.dumps(note).encode() for name, note in notes.items()}
        lease = LeaseRecord(owner, "0123456789ab", "elsewhere", time.time()).dumps()
        self.notes[".reading.step-00000001.abcdef123456"] = lease
        self.tier = _tier_sample(scratch / "sample-tier")
        sweep = samples.sweep(scratch / "sample-sweep", dict([*samples.STALLS.items()][:2]), repeats=1)
        command("report", sweep, "--output", scratch)  # matplotlib writes to the home of the user when it is imported
        jobs = [PlannedJob(n, str(n), ("stager=blocking",)) for n in range(2)]
        Plan(sweep, tuple(jobs), "python train.py -m", 1.7e9).write()
        samples.write_hydra(samples.write_run(scratch / "sample-run"), ["train.steps=4"])
        self.sweep, self.run = files_of(sweep), files_of(scratch / "sample-run")
        for name in ("sample-sweep", "sample-run"):
            shutil.rmtree(scratch / name)

    def make(self, rng: Random) -> str:
        place = rng.choice(("store", "store", "tier", "sweep", "run"))
        given = {"store": {**self.sample, **self.notes}, "tier": self.tier, "sweep": self.sweep, "run": self.run}[place]
        if place == "store":
            names = [
                *self.notes,
                *self.notes,
                "latest",
                "step-00000002/manifest.json",
                "step-00000002/index.json",
                DATA,
            ]
            given = {**given, **{".run.json": self.notes[".run.json"]}}
            name = rng.choice(names)
            name = f"step-00000002/{DATA}" if name == DATA else name
        else:
            name = rng.choice(sorted(given))
        files = dict(given)
        folder = self.folder / {"store": "runs"}.get(place, place)
        old = files.pop(name)
        others = rng.random() < 0.3 and place == "store"
        files = {each: data for each, data in files.items() if not (others and each in self.notes)}
        lay(folder, {**files, "private": PRIVATE.encode()} if place == "store" else files)
        return f"{place} {name}: {self._plant(rng, folder / name, old)}"

    def _plant(self, rng: Random, path: Path, old: bytes) -> str:
        """Write something else in the place of a file, and return what."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if old.startswith(b"link:"):
            target = rng.choice(
                ("step-00000001", "step-99999999", "latest", ".", "..", "/", "/dev/zero", "private", "x" * 200)
            )
            what = rng.choice(("link", "link", "link", "file", "fifo", "folder"))
        else:
            target = rng.choice((str(self.scratch / "home" / ".bashrc"), "/dev/zero", "nothing", path.name, ".."))
            what = rng.choice(
                ("content",) * 6 + ("link", "fifo", "sparse", "folder", "device", "socket", "gone", "long")
            )
        if what == "link":
            path.symlink_to(target)
            return f"link to {target:.20}"
        if what == "fifo":
            os.mkfifo(path)
        elif what == "sparse":
            path.touch()
            os.truncate(path, 64 << 30)
        elif what == "folder":
            path.mkdir()
            (path / "keep").write_text("of the user")
        elif what == "device":
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)) if not os.getuid() else os.mkfifo(path)
        elif what == "socket":
            with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
                made.bind(path.name)
        elif what == "long":
            path.write_bytes(old + b" " * (20 << 20))
        elif what != "gone":
            data, what = self._content(rng, path.name, old)
            path.write_bytes(data)
        return what

    @staticmethod
    def _content(rng: Random, name: str, old: bytes) -> tuple[bytes, str]:
        lines = old.split(b"\n")
        at = rng.randrange(len(lines)) if name.endswith("jsonl") else 0
        try:
            value = json.loads(lines[at] if name.endswith("jsonl") else old)
        except ValueError:
            value = None
        if rng.random() < 0.2 or (value is None and rng.random() < 0.5):
            return mutate_bytes(rng, old)
        if not isinstance(value, (dict, list)):
            data = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
            return rng.choice((data, b"- " + data, b"a: " + data, old + data, old.replace(b"=", b"=" + data))), "text"
        is_part = name.startswith("part-") and "crc32" in value
        if is_part:
            del value["crc32"]
        mutant, how = mutate_json(rng, value)
        if is_part and isinstance(mutant.value, dict):
            with contextlib.suppress(ValueError, RecursionError):
                mutant.value["crc32"] = crc32(json.dumps(json.loads(mutant.text())).encode())
        data = mutant.text().encode() + (b"\n" if is_part else b"")
        return (b"\n".join([*lines[:at], data, *lines[at + 1 :]]) if name.endswith("jsonl") else data), how

    def actions(self, rng: Random) -> Iterator[Action]:
        root, tier = self.folder / "runs", self.folder / "tier"
        if root.exists():
            yield "open_checkpoint", lambda: self.read(root, rng)
            commands: tuple[Action, ...] = (
                ("ls", lambda: command("ls", root, codes=(0,))),
                ("ls --json", lambda: self.expect_first(command("ls", root, "--json", codes=(0,)))),
                ("verify", lambda: command("verify", root, "--fast", codes=(0, 1))),
            )
            yield rng.choice(commands)
            near = rng.random() < 0.2
            how = {"tier": stagereg.build("tier", "disk", dir=str(tier), every=1, copies=0)} if near else {}
            yield "restore and save", lambda: self.restore(root, "auto", keep=2, **how)
        elif tier.exists():
            name, *more = rng.choice((("ls",), ("ls", "--json"), ("ls", "--verify"), ("verify",)))
            yield name, lambda: command(name, tier / "tier", *more)
            if rng.random() < 0.3:
                near = stagereg.build("tier", "disk", dir=str(tier / "tier"), every=1, copies=0)
                yield "restore", lambda: self.restore(tier / "runs", "auto", tier=near)
        else:
            folder = next(each for name in ("sweep", "run") if (each := self.folder / name).exists())
            out = self.folder / "report"
            out.mkdir()
            more = ("--output", str(out)) if folder.name == "sweep" else ()
            more = rng.choice((more, ("--json",)))
            yield "report", lambda: command("report", folder, *more)
            yield "what was written", lambda: _expect_nothing_private(out)

    def after_restore(self, reading: stagereg.Checkpointer, step: int) -> None:
        reading.save(step + 5, state(2))
        reading.wait()


def _expect_nothing_private(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and PRIVATE.encode() in path.read_bytes():
            raise Wrong("writes what is private", path.name)


def _tier_sample(folder: Path) -> Files:
    """Return the files that a run has left which was killed: of its tier and of its store."""
    tier = stagereg.build("tier", "disk", dir=str(folder / "tier"), every=1, copies=0)
    with checkpointer(folder / "runs", every=100, tier=tier) as saving:
        saving.save(1, state(1))
        saving.wait()
        saving.maybe_save(2, state(2))
        saving.wait()
        shutil.copytree(folder, folder.with_name("killed"), symlinks=True)
    found = files_of(folder.with_name("killed"))
    part = next(name for name in found if name.endswith("part-0.json"))
    run = "/".join(part.split("/")[:2])
    found |= {f"{part}.copied": b"machine-a\nmachine-b", f"{part}.received": b"", f"{run}/.boot": b"0123-4567"}
    for each in (folder, folder.with_name("killed")):
        shutil.rmtree(each)
    return found


class Wire(Kind):
    """What comes over the network, before the proof and behind it: to a pulse, to a tier, and from a rogue one."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.content = tier_parts.data_of(5000)
        self.errors: list[BaseException] = []
        pulse.os = _HarmlessOs()  # type: ignore[attr-defined]
        threading.excepthook = lambda told: self.errors.append(told.exc_value) if told.exc_value else None

    def make(self, rng: Random) -> str:
        self.way = rng.choice(("hub_stranger", "hub_rank", "rogue_hub", "tier_stranger", "tier_peer", "rogue_tier"))
        self.seed = rng.random()
        return self.way

    def actions(self, rng: Random) -> Iterator[Action]:
        yield self.way, lambda: self.run(Random(self.seed))

    def run(self, rng: Random) -> None:
        self.errors.clear()
        try:
            getattr(self, f"_{self.way}")(rng)
        finally:
            if self.errors:  # of a thread, for which the other side has only seen an end
                raise self.errors[0]

    # the pulse

    @contextlib.contextmanager
    def _pulse(self, rank: int, hub: list[Any] | None) -> Iterator[socket.socket]:
        """Run the pulse of a rank on a thread, and give the rank's side of it."""
        ours, its = socket.socketpair()
        its.setblocking(False)
        beating = pulse.Heartbeat(
            pulse.Config(rank, f"process {rank}", _WAIT_S, _SECRET, hub, 4),
            os.getppid(),
            pulse.Line(its.fileno(), its.fileno()),
        )
        thread = threading.Thread(target=beating.run)
        thread.start()
        try:
            yield ours
        finally:
            with contextlib.suppress(OSError):
                ours.sendall(b'"bye"\n')
            thread.join(_WAIT_S)
            for each in (
                ours,
                its,
                beating._listener,
                beating._selector,
                *(line.opened for line in beating._lines.values()),
            ):
                if each is not None:
                    each.close()
        if thread.is_alive():
            raise Wrong("the pulse does not end")

    @contextlib.contextmanager
    def _caller(self, port: int, rank: int) -> Iterator[tuple[socket.socket, bytes]]:
        """Connect to a hub, and give the right answer to its challenge, which is not sent yet."""
        with socket.create_connection(("127.0.0.1", port), _WAIT_S) as caller:
            right = pulse.proof(_SECRET, _line(caller).decode(), rank)
            yield caller, f"{rank} {right} process {rank}\n".encode()

    def _hub_stranger(self, rng: Random, proven: bool = False) -> None:
        with self._pulse(0, None) as ours:
            port = json.loads(_line(ours))["port"]
            with self._caller(port, 2) as (caller, answer):
                first = answer
                if not proven:
                    text = rng.choice(TEXTS).encode("utf-8", "replace")
                    first = rng.choice((mutate_bytes(rng, answer)[0], answer.replace(b"2", text, 1)))
                    proven = first.split(b" ")[:2] == answer.split(b" ")[:2]
                _send(caller, first + _pulse_lines(rng))
                if _rest(caller) and not proven:
                    raise Wrong("a stranger is told more than the challenge")
            for rank in (1, 2):
                with self._caller(port, rank) as (caller, answer):
                    caller.sendall(answer)
                    if not _line(caller).startswith(b"."):
                        raise Wrong("an honest rank is not let in")
                    _send(caller, b"bye\n")
                    if b"failed" in _rest(caller) and not proven:
                        raise Wrong("a stranger has had a rank declared failed")

    def _hub_rank(self, rng: Random) -> None:
        self._hub_stranger(rng, proven=True)

    def _rogue_hub(self, rng: Random) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, self._pulse(1, [*listener.getsockname(), "the hub"]):
            listener.settimeout(_WAIT_S)
            with listener.accept()[0] as hub:
                knows, challenge = rng.random() < 0.5, b"challenge"
                proof = f".{pulse.proof(_SECRET, challenge.decode(), 'hub')}\n".encode()
                _send(hub, challenge + b"\n" + proof * knows + _pulse_lines(rng))
                _rest(hub)
            listener.close()  # which is an end for the rank

    # the tier

    def _machine(self) -> tuple[Any, Part]:
        folder = tier_parts.new_folder(self.folder / "machine")
        return folder, tier_parts.write_part(folder, {"x": len(self.content)}, token="ab" * 8)

    def _tier_stranger(self, rng: Random, proven: bool = False) -> None:
        folder, part = self._machine()
        with tier_parts.serving(folder) as server:
            with socket.create_connection(server.address, _WAIT_S) as caller:
                hello = _take(caller, len(wire._HELLO) + 32)
                own = bytes(32)
                proof = own + wire._proof(tier_parts.SECRET, b"calls", hello[-32:], own)
                if proven:
                    caller.sendall(proof)
                    _take(caller, 32)
                    self._requests(rng, caller, part)
                else:
                    changed = mutate_bytes(rng, proof)[0]
                    _send(caller, changed if changed[:64] != proof else b"")
                    if len(_rest(caller)) >= 32:
                        raise Wrong("the tier answers a stranger")
            with tier_parts.connected(server.address) as honest:
                if honest.part(part.save, 0) != part:
                    raise Wrong("the tier does not serve its own part any more")
        known = {".boot"}
        for each in folder.parts():
            for name, file in each.files.items():
                if PartFile.of_bytes(Path(folder.directory(each.save), name).read_bytes()) != file:
                    raise Wrong("a part is complete, and its bytes are others")
            known |= {f"part-{each.rank}.json", *each.files}
        if left := {*tier_parts.files_below(folder)} - known:
            raise Wrong("files are left over", str(left))

    def _tier_peer(self, rng: Random) -> None:
        self._tier_stranger(rng, proven=True)

    def _requests(self, rng: Random, caller: socket.socket, part: Part) -> None:
        """Send the requests of a part that comes in, one of them mutated."""
        new = Part(part.save._replace(token="cd" * 8, serial=9), 1, {"y": PartFile.of_bytes(self.content)})
        asks: list[dict[str, Any]] = [{"do": "part", "save": [*part.save], "rank": 0}]
        asks += [
            {"do": "get", "save": [*part.save], "rank": 0, "file": "x", "block": 0},
            {"do": "put", "part": new.dumps()},
        ]
        asks += [
            {"do": "stream", "token": "0" * 12},
            {"do": "block", "file": "y", "block": 0},
            {"do": "end"},
            {"do": "finish"},
        ]
        asks = rng.choice((asks, asks[2:3] + asks[4:], asks[:3] + asks[4:], rng.sample(asks, 4)))
        which = rng.randrange(len(asks))
        for number, ask in enumerate(asks):
            text = json.dumps(ask).encode()
            if number == which:
                text = _mutated(rng, ask)
            data = self.content if ask["do"] == "block" else b""
            if number == which and rng.random() < 0.3:
                data = mutate_bytes(rng, data)[0]
            _send(caller, _framed(rng, text, number == which) + data, end=False)
        _send(caller, b"")
        _rest(caller)

    def _rogue_tier(self, rng: Random) -> None:
        folder, part = self._machine()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=self._answer_wrongly, args=(rng, listener, part))
            thread.start()
            peer = Peer(listener.getsockname(), tier_parts.SECRET)
            taken: dict[int, bytes] = {}
            ask = Random(self.seed).choice(("part", "get", "put"))
            try:
                with contextlib.suppress(OSError, ValueError):
                    if ask == "part":
                        peer.part(part.save, 0)
                    elif ask == "get":
                        peer.get(
                            part.save, 0, "x", [0], part.files["x"], lambda n, block: taken.update({n: bytes(block)})
                        )
                    else:
                        peer.put(part, folder.directory(part.save))
            finally:
                peer.close()
                thread.join(_WAIT_S)
            if any(block != self.content for block in taken.values()):
                raise Wrong("a block was taken that is not what was staged")

    def _answer_wrongly(self, rng: Random, listener: socket.socket, part: Part) -> None:
        listener.settimeout(_WAIT_S)
        with contextlib.suppress(OSError), listener.accept()[0] as caller:
            nonce = bytes(32)
            hello = wire._HELLO + nonce
            early = rng.random()
            if early < 0.2:
                _send(caller, mutate_bytes(rng, hello)[0])
                return
            caller.sendall(hello)
            answer = wire._proof(tier_parts.SECRET, b"answers", nonce, _take(caller, 64)[:32])
            if early < 0.4:
                _send(caller, mutate_bytes(rng, answer)[0])
                return
            answers: list[dict[str, Any]] = [{"part": part.dumps()}, {"nbytes": len(self.content)}, {"token": "ab"}]
            answers += [{"have": True}, {"error": "no room"}, {}]
            caller.sendall(answer)
            _send(caller, _framed(rng, _mutated(rng, rng.choice(answers)), True) + mutate_bytes(rng, self.content)[0])
            _rest(caller)


class _HarmlessOs:
    """The module ``os`` without ``kill``, for a pulse that takes this process for the child of a rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def kill(self, process: int, number: int) -> None:
        raise Wrong("the pulse kills its rank")


def _mutated(rng: Random, value: Any) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(rng, json.dumps(value).encode())[0]
    return mutate_json(rng, value)[0].text().encode()


def _framed(rng: Random, text: bytes, mutated: bool) -> bytes:
    length = len(text)
    if mutated and rng.random() < 0.2:
        length = rng.choice((0, 1, length + 1, max(0, length - 1), 64 << 20, (64 << 20) + 1, (1 << 32) - 1))
    return struct.pack("!I", length) + text


def _pulse_lines(rng: Random) -> bytes:
    """Return mutated lines as pulses send them."""
    told: dict[str, Any] = {"failed": {"1": ["process 1 on here", "its process has ended"]}}
    lines = []
    for _ in range(rng.choice((1, 2, 5))):
        whole = mutate_json(rng, told)[0].text().encode()
        text = rng.choice(TEXTS).encode("utf-8", "replace")
        lines.append(
            rng.choice(
                (whole, whole, mutate_bytes(rng, whole)[0], text, b".", b"shorten", b'"shorten"', text + b" 0" * 9)
            )
        )
    return b"\n".join(lines) + rng.choice((b"\n", b"\n", b""))


def _send(target: socket.socket, data: bytes, end: bool = True) -> None:
    """Send as far as the other side takes it, and end."""
    target.settimeout(_WAIT_S)
    with contextlib.suppress(OSError):
        target.sendall(data)
        if end:
            target.shutdown(socket.SHUT_WR)


def _take(source: socket.socket, count: int) -> bytes:
    source.settimeout(_WAIT_S)
    return source.recv(count, socket.MSG_WAITALL)


def _line(source: socket.socket) -> bytes:
    """Return the next line. Raises: ``Wrong`` if there is none."""
    source.settimeout(_WAIT_S)
    found = b""
    with contextlib.suppress(OSError):
        while (byte := source.recv(1)) not in (b"", b"\n"):
            found += byte
        if byte:
            return found
    raise Wrong("the pulse does not answer")


def _rest(source: socket.socket) -> bytes:
    """Return all that comes until the other side ends. Raises: ``Wrong`` if it does not."""
    source.settimeout(_WAIT_S)
    found = b""
    try:
        while block := source.recv(1 << 16):
            found += block
    except TimeoutError:
        raise Wrong("the other side keeps a connection that has ended") from None
    except OSError:
        pass
    return found
