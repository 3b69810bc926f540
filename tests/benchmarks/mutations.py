"""Seeded mutations of JSON, bytes, pickles and zip archives, for ``make fuzz``: one random generator, one result."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

DEPTHS = (150, 199, 200, 201, 330, 1000, 3000, 10_000, 100_000)
NUMBERS = (-1, 0, 1, 2, 7, 255, 4300, 1 << 15, 1 << 16, 10**6, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 38)
NUMBERS = (*NUMBERS, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 70, -(1 << 63), -(1 << 70))
FOREIGN = ("os.system", "builtins.eval", "builtins.exec", "evil.Payload", "this.s", "subprocess.Popen", "torch.load")
FOREIGN = (*FOREIGN, "torch.distributed.device_mesh.DeviceMesh", "torch.nn.modules.linear.Linear", "builtins.getattr")
FOREIGN = (*FOREIGN, "torch._utils._rebuild_tensor_v2", "torch.storage.UntypedStorage", "collections.deque")
TEXTS = (
    "",
    " ",
    ".",
    "..",
    "../private",
    "/etc/passwd",
    "PRIVATE",
    "a/b",
    "a\\b",
    "a\0b",
    "\n",
    "\x1b[31mred\x07",
    "\ud800",
)
TEXTS = (*TEXTS, "١٢٣", "²", "9" * 19, "9" * 20, "9" * 5000, "-1", "1e9", "nan", "x" * 300, "y" * 100_000, "é" * 255)
TEXTS = (
    *TEXTS,
    "=cmd|calc!A1",
    "@SUM(1)",
    "<script>alert(1)</script>",
    "${oc.env:FUZZ_PRIVATE}",
    "%s%n",
    "step-00000001",
)
TEXTS = (*TEXTS, "latest", "manifest.json", "index.json", ".metadata", "float32", "archive", "subclass", *FOREIGN)
TYPES = ("dict", "OrderedDict", "Counter", "tuple", "set", "frozenset", "bytes", "float", "per_rank", "DictConfig")
TYPES = (
    *TYPES,
    "ListConfig",
    "numpy.float32",
    "numpy.int64",
    "numpy.bool",
    "numpy.object",
    "defaultdict",
    *FOREIGN[:5],
)
_RAW = re.compile(r'"<raw ([0-9]+)>"')
Random = random.Random


def nested(depth: int, kind: str, core: str = "{}") -> str:
    """Return JSON that is so deep."""
    begin, end = {"list": ("[", "]"), "object": ('{"a":', "}"), "dict": ('{"type":"dict","value":{"a":', "}}")}[kind]
    return begin * depth + core + end * depth


class JsonMutant:
    """A JSON value under mutation, or what is under a key of it; :meth:`text` may say what no value of Python can."""

    def __init__(self, rng: Random, value: Any, under: str = "") -> None:
        self.rng, self.value, self.under, self._raw = rng, copy.deepcopy(value), under, list[str]()

    def text(self, **how: Any) -> str:
        """Return it as JSON."""
        return _RAW.sub(lambda found: self._raw[int(found[1])], json.dumps(self.value, **how))

    def raw(self, text: str) -> str:
        """Return a value that is written as this text."""
        self._raw.append(text)
        return f"<raw {len(self._raw) - 1}>"

    def odd(self) -> Any:
        """Return a value that is rarely right."""
        rng = self.rng
        makes: Sequence[Callable[[], Any]] = (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice((None, True, False, [], {}, [[]], [{}], 0.5, -0.0, 1e308, float("nan"), float("inf"))),
            lambda: self.raw(
                rng.choice(("9" * 5000, "-" + "9" * 5000, "1e400", "1E5", "1.0", "-0", "0." + "1" * 5000))
            ),
            lambda: self.raw(nested(rng.choice(DEPTHS), rng.choice(("list", "object", "dict")))),
            lambda: {
                "type": rng.choice(TYPES),
                "value": rng.choice((*NUMBERS, {}, [], [[{}, {}]], "nan", [[1, {}]], "QQ==")),
            },
        )
        return rng.choice(makes)()

    def places(self) -> list[tuple[Any, Any]]:
        """Return each container with each key or position in it."""
        found: list[tuple[Any, Any]] = []
        seen: list[Any] = [self.value[self.under] if self.under else self.value]
        while seen:
            container = seen.pop()
            if isinstance(container, (dict, list)):
                keys = list(container) if isinstance(container, dict) else list(range(len(container)))
                found += [(container, key) for key in keys]
                seen += [container[key] for key in keys]
        return found

    def mutate(self) -> str:
        """Change one thing, and return what was done."""
        rng, places = self.rng, self.places()
        if not places:
            return "nothing is left"
        numbers = [each for each in places if type(each[0][each[1]]) is int]
        if numbers and rng.random() < 0.25:
            container, key = rng.choice(numbers)
            before = container[key]
            near = (
                before - 1,
                before + 1,
                before * 2,
                -before,
                before + 4096,
                float(before),
                str(before),
                bool(before),
            )
            container[key] = rng.choice((*near, rng.choice(NUMBERS), [before]))
            return f"{before} at {key!r:.40} is {container[key]!r:.40}"
        container, key = rng.choice(places)
        what = rng.choice(("odd", "odd", "delete", "add", "swap", "copy", "twice", "rename", "wrap"))
        if what == "odd":
            container[key] = self.odd()
        elif what == "delete":
            del container[key]
        elif what == "add":
            new = rng.choice(TEXTS)
            container.update({new: self.odd()}) if isinstance(container, dict) else container.insert(key, self.odd())
        elif what == "swap":
            other, at = rng.choice(places)
            container[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(container[key])
        elif what == "copy":
            other, at = rng.choice(places)
            container[key] = copy.deepcopy(other[at])
        elif what == "twice" and isinstance(container, dict):
            container[key] = self.raw(f"{self._plain(self.odd())}, {json.dumps(key)}: {self._plain(container[key])}")
        elif what == "rename" and isinstance(container, dict):
            container[rng.choice((*TEXTS, *map(str, NUMBERS)))] = container.pop(key)
        else:
            container[key] = self.raw(nested(rng.choice(DEPTHS), "list", self._plain(container[key])))
        return f"{what} at {key!r:.40}"

    def _plain(self, value: Any) -> str:
        return _RAW.sub(lambda found: self._raw[int(found[1])], json.dumps(value))


def mutate_json(rng: Random, value: Any, under: str = "") -> tuple[JsonMutant, str]:
    """Return a mutant of a JSON value, and what was done."""
    mutant = JsonMutant(rng, value, under)
    return mutant, "; ".join(mutant.mutate() for _ in range(rng.choice((1, 1, 1, 2, 4))))


def mutate_bytes(rng: Random, data: bytes) -> tuple[bytes, str]:
    """Return other bytes, and what was done: flips, numbers, cuts, splices, repetitions."""
    what = rng.choice(("flip", "flip", "number", "cut", "end", "splice", "insert", "long", "empty"))
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if what == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))) if data else ():
            changed[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        return bytes(changed), what
    if what == "number":
        piece = struct.pack(rng.choice(("<H", "<I", "<Q", ">I")), rng.choice((0, 1, 0x7FFF, 0xFFFF, 0x8000)))
        return data[:at] + piece + data[at + len(piece) :], what
    whole = {
        "cut": data[:at] + data[to:],
        "end": data[:at],
        "splice": data[:to] + data[at:],
        "insert": data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:],
        "long": data + rng.choice((b"\0", b"[", b"\n", b"9")) * rng.choice((1, 100, 100_000)),
        "empty": b"",
    }
    return whole[what], what


# -- pickles


def pieces(data: bytes) -> list[tuple[str, Any, bytes]]:
    """Return the instructions of a pickle: names, arguments, bytes."""
    found = list(pickletools.genops(data))
    ends = [at for _, _, at in found[1:]] + [len(data)]
    return [(op.name, arg, data[at or 0 : end]) for (op, arg, at), end in zip(found, ends, strict=True)]  # type: ignore[misc]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


def _name(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def mutate_pickle(rng: Random, data: bytes) -> tuple[bytes, str]:
    """Return another pickle, and what was done with its instructions."""
    ops = pieces(data)
    named = sorted({str(arg).replace(" ", ".") for name, arg, _ in ops if name == "GLOBAL"})
    names = [*named, *FOREIGN] or [*FOREIGN]
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(ops))
        what = rng.choice(
            ("value", "value", "value", "memo", "drop", "twice", "swap", "insert", "deep", "build", "global")
        )
        if what in ("value", "memo", "global"):
            kinds = {"value": ("INT", "LONG", "UNICODE"), "memo": ("PUT", "GET", "MEMOIZE"), "global": ("GLOBAL",)}[
                what
            ]
            fits = [i for i, (name, *_) in enumerate(ops) if any(kind in name for kind in kinds)]
            at = rng.choice(fits or [at])
        name, arg, old = ops[at]
        if what == "memo":
            index = rng.choice((0, 1, 254, 1 << 16, 1 << 20, 1 << 26, 1 << 28, (1 << 31) - 1, (1 << 32) - 1))
            new = rng.choice((b"r", b"j")) + struct.pack("<I", index)
        elif what == "global":
            new = _name(rng.choice(names))
        elif what == "value":
            near = [arg - 1, arg + 1, arg * 2, -arg] if type(arg) is int else [0]
            new = rng.choice(
                (_number(rng.choice((*NUMBERS, *near))), _text(rng.choice(TEXTS)), b"N", b"\x88", b"]", b")")
            )
        elif what == "insert":
            more = (
                b"R",
                b"b",
                b"0",
                b"(",
                b"t",
                b"e",
                b"s",
                b"u",
                b"\x81",
                b"Q",
                b"2",
                b"o",
                b"\x93",
                b"a",
                b"1",
                b"l",
            )
            sized = b"\x8e" + struct.pack("<Q", rng.choice((1 << 34, 1 << 60)))
            new = old + rng.choice(
                (*more, _name(rng.choice(names)), _number(rng.choice(NUMBERS)), sized, b"\x96" + sized[1:])
            )
        elif what == "deep":
            depth = rng.choice(DEPTHS)
            new = old + rng.choice(
                (b"\x85" * depth, b"]" * depth + b"a" * depth, b"(" * depth, b"2" * depth + b"0" * depth)
            )
        elif what == "build":
            new = old + _name(rng.choice(names)) + b"}X\x04\0\0\0evilK\x01sb0"
        else:
            new = {"drop": b"", "twice": old + old, "swap": ops[at - 1][2]}[what]
            ops[at - 1] = (*ops[at - 1][:2], old) if what == "swap" else ops[at - 1]
        ops[at] = (name, arg, new)
        done.append(f"{what} at {name} {arg!r:.40}")
    return b"".join(piece for *_, piece in ops), "; ".join(done)


# -- zip archives

_LOCAL, _ENTRY, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")


class Record:
    """One record of an archive: its local header as a list of fields, its bytes, what follows, its directory entry."""

    def __init__(self, data: bytes, entry: Sequence[Any], name: bytes, more: bytes, next_: int) -> None:
        at = entry[16]
        self.local, self.entry = list(_LOCAL.unpack_from(data, at)), list(entry)
        begin = at + _LOCAL.size + self.local[9] + self.local[10]
        self.local_name = data[at + _LOCAL.size :][: self.local[9]]
        self.extra = data[at + _LOCAL.size + self.local[9] : begin]
        self.data, self.after = data[begin : begin + entry[8]], data[begin + entry[8] : next_]
        self.name, self.more = name, more

    def head(self) -> bytes:
        """Return the local header."""
        self.local[9], self.local[10] = len(self.local_name), len(self.extra)
        return _LOCAL.pack(*self.local) + self.local_name + self.extra

    def place(self, offset: int) -> bytes:
        """Return the directory entry."""
        entry = [*self.entry]
        entry[10], entry[11], entry[16] = len(self.name), len(self.more), offset
        return _ENTRY.pack(*entry) + self.name + self.more

    def resize(self, data: bytes, stored: bytes | None = None) -> None:
        """Have other bytes, deflated to ``stored`` if that is given, with fields that fit."""
        self.data = data if stored is None else stored
        self.entry[4] = self.local[3] = 0 if stored is None else 8
        crc = zlib.crc32(data)
        self.entry[7:10] = crc, len(self.data), len(data)
        self.after = struct.pack("<4s3I", b"PK\7\x08", crc, len(self.data), len(data))


def records(data: bytes) -> list[Record]:
    """Return the records of an archive as torch writes it."""
    end = data.rindex(b"PK\5\6")
    _, _, _, _, count, _, at, _ = _END.unpack_from(data, end)
    found, first = [], at
    for _ in range(count):
        entry = _ENTRY.unpack_from(data, at)
        begin = at + _ENTRY.size
        found.append((entry, data[begin : begin + entry[10]], data[begin + entry[10] : begin + entry[10] + entry[11]]))
        at = begin + entry[10] + entry[11] + entry[12]
    nexts = [entry[16] for entry, *_ in found[1:]] + [first]
    return [Record(data, *each, next_) for each, next_ in zip(found, nexts, strict=True)]


def join(parts: Sequence[Record], gap: bytes = b"", before: bytes = b"") -> tuple[bytes, bytes, bytes]:
    """Return the records, the directory, and the end of an archive as torch writes it: zip64 and plain."""
    body, places = bytearray(before), []
    for part in parts:
        places.append(part.place(len(body)))
        body += part.head() + part.data + part.after + gap
    directory, count, at = b"".join(places), len(places), len(body)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), at, 0)
    return bytes(body), directory, _zip64(count, count, len(directory), at, at + len(directory)) + end


def _zip64(here: int, count: int, size: int, at: int, own: int) -> bytes:
    return _END64.pack(b"PK\6\6", 44, 798, 45, 0, 0, here, count, size, at) + struct.pack(
        "<4sIQI", b"PK\6\7", 0, own, 1
    )


def _lying(rng: Random, part: Record) -> str:
    """Change a field of one header of a record."""
    fields = rng.choice((part.local, part.entry))
    which = rng.choice([i for i, each in enumerate(fields) if type(each) is int and i not in (9, 10, 11, 16)])
    which = which if fields is part.entry else min(which, 8)
    wide = which >= (6 if fields is part.local else 7)
    fields[which] = rng.choice(
        (0, 1, 2, 8, 40, 1000, 0xFFFF, fields[which] ^ 1, *((0xFFFFFFFF, 1 << 31) if wide else ()))
    )
    if fields is part.entry and which in (12,):
        fields[which] = 0
    fields[which] &= 0xFFFFFFFF if wide and not (fields is part.entry and 10 <= which <= 14) else 0xFFFF
    return f"field {which} of the {'local header' if fields is part.local else 'entry'} of {part.name!r}"


def mutate_zip(rng: Random, data: bytes) -> tuple[bytes, str]:
    """Return another archive, and what was done."""
    parts = records(data)
    part = rng.choice(parts)
    kinds = (
        "bytes",
        "pickle",
        "pickle",
        "field",
        "field",
        "deflate",
        "two",
        "gap",
        "front",
        "tail",
        "comment",
        "zip64",
    )
    what = rng.choice((*kinds, "rename", "order", "twice", "missing", "content", "end", "extra", "legacy", "legacy"))
    if what in ("deflate", "two", "content") and rng.random() < 0.6:
        part = next((each for each in parts if each.name.endswith(b"/data/0")), part)
    if what == "bytes":
        changed, how = mutate_bytes(rng, data)
        return changed, f"bytes: {how}"
    if what == "legacy":
        return _legacy(rng)
    if what == "pickle":
        part = parts[0]
        changed, how = mutate_pickle(rng, part.data)
        part.resize(changed)
        what = f"pickle: {how}"
    elif what == "field":
        what = _lying(rng, part)
    elif what == "deflate" or (what == "two" and rng.random() < 0.5):
        content = rng.choice((part.data, bytes(100_000), part.data + bytes(1000)))
        squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
        part.resize(content, squeeze.compress(content) + squeeze.flush())
    elif what == "rename":
        old, new = rng.choice(
            ((b"archive/", b"other/"), (b"data/0", b"data/../0"), (b"data", b"DATA"), (b"archive/", b""))
        )
        for each in rng.choice((parts, [part])):
            each.name = each.name.replace(old, new)
            each.local_name = rng.choice((each.name, each.local_name))
    elif what == "order":
        rng.shuffle(parts)
    elif what in ("twice", "missing"):
        index = parts.index(part)
        parts[index : index + 1] = [part, copy.deepcopy(part)] if what == "twice" else []
        if what == "twice":
            parts[index + 1].resize(mutate_bytes(rng, part.data)[0])
    elif what == "content":
        part.resize(
            rng.choice((b"", b"big", b"little", b"3\n", part.data[:-1], part.data * 2, mutate_bytes(rng, part.data)[0]))
        )
    elif what == "extra":
        part.extra, part.more = rng.choice((b"", b"\1\0\x10\0" + struct.pack("<2Q", 1 << 34, 1 << 33))), part.extra
    body, directory, end = join(parts, b"gap" * (what == "gap"))
    if what == "two":
        squeezed = [copy.deepcopy(each) for each in parts]
        method, sizes = rng.choice((0, 0, 8)), rng.choice(([1, 1], None))
        for each in squeezed:
            each.entry[4], each.entry[8:10] = method, sizes or each.entry[8:10]
        lie = join(squeezed)[1]
        first, second = rng.choice(((directory, lie), (lie, directory)))
        count, at = len(parts), len(body)
        far = _zip64(count, count, len(directory), at, at + len(first) + len(second))
        return body + first + second + rng.choice((b"", far)) + end[-_END.size :], what
    if what == "front":
        body, directory, end = join(parts, before=rng.choice((b"junk", data, b"\x80\x02]q\0.", bytes(64))))
    if what == "zip64":
        count, size, at = len(parts), len(directory), len(body)
        lies = [rng.choice((each, each, 0, 1, (1 << 64) - 1, each + 1)) for each in (count, count, size, at, at + size)]
        plain = rng.choice(((0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (count, count, size, at)))
        end = rng.choice((b"", _zip64(*lies))) + _END.pack(b"PK\5\6", 0, 0, *plain, 0)
    if what == "end":
        fields = list(_END.unpack(end[-_END.size :]))
        which = rng.randrange(1, 8)
        fields[which] = rng.choice((0, 1, 0xFFFF, fields[which] + 1, max(0, fields[which] - 1)))
        end = end[: -_END.size] + _END.pack(*fields)
    tail = rng.choice((b"\0", b"junk" * 50, data, end)) if what == "tail" else b""
    if what == "comment":
        tail = rng.choice((b"a comment", end, b"PK\5\6"))
        end = end[:-2] + struct.pack("<H", len(tail))
    return body + directory + end + tail, what


def _legacy(rng: Random) -> tuple[bytes, str]:
    """Return an archive of torch's older format, with or without bytes for its storages, and a zip archive behind."""
    import torch

    stream = io.BytesIO()
    torch.save((torch.full((16,), 3, dtype=torch.uint8), 1), stream, _use_new_zipfile_serialization=False)
    # The key of a storage is an address, which differs between processes.
    old = re.sub(rb"X.\0\0\0\d{9,20}", b"X\2\0\0\x0042", stream.getvalue(), flags=re.DOTALL)
    source, parts = io.BytesIO(old), []
    for _ in range(5):  # magic number, protocol, system, object, keys of storages
        begin = source.tell()
        list(pickletools.genops(source))
        parts.append(old[begin : source.tell()])
    how = []
    if rng.random() < 0.7:
        parts[3] = parts[3].replace(b"K\x10", b"J" + struct.pack("<i", rng.choice((4096, 17, 1 << 20, 1 << 30))))
        how.append("claims")
    if rng.random() < 0.3:
        parts[3], done = mutate_pickle(rng, parts[3])
        how.append(done)
    parts[4:] = [pickle.dumps([], 2)] if rng.random() < 0.7 else [parts[4], old[source.tell() :]]
    small = io.BytesIO()
    torch.save(1, small)
    tail = rng.choice((b"", small.getvalue(), small.getvalue()))
    return b"".join(parts) + tail, f"legacy: {'; '.join(how)}, {len(tail)} bytes of a zip archive behind"
