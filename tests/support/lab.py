"""A lab of machines on this one: each with its own network, host name, processes, disk, shared memory and boot id.

A machine is a set of Linux namespaces whose first process ends when the pipe that it reads closes, so a lab is gone
when its test is, however that ends; it has no name on the host, and two labs cannot meet. ``LOCAL`` is each machine's
own disk and ``/dev/shm`` its own memory; all other folders are one file system that the machines share, such as the
checkout and ``tmp_path``. The lab needs root, iproute2 and util-linux: else the test is skipped, with the reason.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from .programs import comes_true

CHECKOUT = Path(__file__).parents[2]
LOCAL = next((path for path in ("/srv", "/media", "/mnt") if os.path.isdir(path) and not os.listdir(path)), "")
PORT = 29400
_TOOLS = ("ip", "nsenter", "unshare", "mount", "bash")
_MACHINE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork")
_SECONDS = 20.0  # for what the lab itself does
_PROBE = "ip link add type bridge && ip link add type veth && mount -t tmpfs lab /run && mount -t proc proc /proc"
# The first process of the switch, and of a machine: tells its id on the host, which it reads while /proc is the host's,
# and does nothing until its input ends. As it ignores how its children end, those that lost their parent are reaped.
_IDLE = "echo $pid; trap '' CHLD; exec cat"
_SWITCH = """set -e; read -r pid _ < /proc/self/stat
mount -t tmpfs lab $1; touch $1/hosts; mount --bind $1/hosts /etc/hosts
ip link add lab0 type bridge; ip link set lab0 up
"""
_BOOT = """set -e; read -r pid _ < /proc/self/stat
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs run /run
mount --bind $1/$2/boot_id /proc/sys/kernel/random/boot_id
mount --bind $1/$2/shm /dev/shm; mount --bind $1/$2/disk $1
hostname $3; ip link set lo up
"""


class Process:
    """A program in a machine; what it and its children print goes to a file without a name."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._shell = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT
        )

    @property
    def output(self) -> str:
        """What was printed until now."""
        return os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0).decode(errors="replace")

    @property
    def returncode(self) -> int | None:
        """``None`` while it runs; 128 and the number of the signal that ended it, as a shell says it."""
        return self._shell.poll()

    @property
    def pid(self) -> int | None:
        """The program's process, as this host has it; ``None`` while it does not run."""
        return next(iter(children_of(self._shell.pid)), None)

    def wait(self, timeout_s: float) -> int:
        """Return its exit status; one that goes on for longer is killed and fails the test with its output."""
        if not comes_true(lambda: self.returncode is not None, timeout_s):
            self.kill()
            raise AssertionError(f"still runs after {timeout_s:g} s:\n{self.output}")
        return self._shell.wait()

    def report(self) -> str:
        """Return what helps to see why it still runs."""
        return self.output

    def await_output(self, text: str, timeout_s: float) -> None:
        """Wait until it has printed this; if it ends before, the test fails with its output."""
        if not comes_true(lambda: text in self.output or self.returncode is not None, timeout_s):
            raise AssertionError(f"{text!r} not printed in {timeout_s:g} s:\n{self.report()}")
        assert text in self.output, f"ended without {text!r}:\n{self.output}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the program, not to its children, and wait for its end if that is SIGKILL."""
        if comes_true(lambda: self.returncode is not None or self.pid is not None, _SECONDS) and self.pid is not None:
            os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._shell.wait(_SECONDS)


class Machine:
    """One machine, on from the start; all that it does to itself is a call here. Made by :class:`Lab`."""

    def __init__(self, lab: Lab, slot: int) -> None:
        self._lab, self._slot, self._ports = lab, slot, 0
        self._unshare: subprocess.Popen[str] | None = None
        self.pid = 0  # of its first process, on the host
        self.folder = lab.folder / str(slot)
        self.disk = self.folder / "disk"  # what LOCAL is inside, seen from outside: there when it is off, too
        self.shm = self.folder / "shm"  # what /dev/shm is inside
        self.name = self.address = ""
        self._become_another()

    @property
    def is_on(self) -> bool:
        return self._unshare is not None

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | Path = CHECKOUT) -> Process:
        """Start a program here, with these variables besides those of the test."""
        shell = ("sh", "-c", 'cd "$0" && "$@"; exit $?', str(cwd))
        inside = ("--mount", "--uts", "--ipc", "--net", "--pid", "--no-fork", "--", *shell)
        assert self.is_on, f"{self.name} is off"
        return Process(["nsenter", f"--target={self.pid}", *inside, *argv], {**_variables(), **(env or {})})

    def end_processes(self) -> None:
        """Kill all that was started here, and what that started, and wait until it is gone; the machine stays on."""
        self._signal("while kill -KILL -1; do sleep 0.01; done")

    def kill(self, silent: bool = True) -> None:
        """Take its power: all processes end at once and its memory is lost; its disk stays.

        The others hear nothing more of it, unless not ``silent``: then its kernel closes its connections first.
        """
        if self._unshare is None:
            return
        if silent:
            self.cut()
        os.kill(self.pid, signal.SIGKILL)
        self._unshare.communicate(timeout=_SECONDS)  # ends when the last process of the machine has
        # Connections that wait for an answer keep its network alive, which would answer in place of the next one there.
        self._lab.run("ip", "link", "set", self._port, "nomaster", may_fail=True)
        self._unshare = None
        _empty(self.shm)

    def freeze(self) -> None:
        """Stop all its processes; its kernel still answers."""
        self._signal("kill -STOP -1")

    def thaw(self) -> None:
        self._signal("kill -CONT -1")

    def reboot(self) -> None:
        """Take its power, or find it off, and start it with a new boot id, connected."""
        self.kill()
        self._boot()

    def replace(self, same_name: bool = False) -> None:
        """Put another machine in its place, with empty disk and memory; its name and address are new, or the same."""
        self.kill()
        _empty(self.disk)
        if not same_name:
            self._become_another()
        self._boot()

    def cut(self) -> None:
        """Lose each packet from and to the others. Nobody is told."""
        self._lab.run("ip", "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Undo a cut."""
        self._lab.run("ip", "link", "set", self._port, "master", "lab0")

    @property
    def _port(self) -> str:
        return f"m{self._slot}-{self._ports}"  # another one each time: that of a machine just killed may still be there

    def _become_another(self) -> None:
        self.name, self.address = self._lab.new_identity()

    def _boot(self) -> None:
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self._lab.write_hosts()
        command = [*self._lab.inside, *_MACHINE, "bash", "-c", _BOOT + _IDLE, "bash", LOCAL, str(self._slot), self.name]
        self._unshare, self.pid = _started(command)
        self._ports += 1
        hardware = f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"
        pair = ("name", "eth0", "address", hardware, "netns", str(self.pid))
        self._lab.run("ip", "link", "add", self._port, "type", "veth", "peer", *pair)
        self._lab.run("ip", "link", "set", self._port, "master", "lab0", "up")
        self._run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self._run("ip", "link", "set", "eth0", "up")

    def _run(self, *command: str) -> None:
        _run("nsenter", f"--target={self.pid}", "--net", "--", *command)

    def _signal(self, command: str) -> None:
        if self.is_on:  # -1 is all processes of the machine but the first and the shell that sends the signal
            _run("nsenter", f"--target={self.pid}", "--pid", "--", "sh", "-c", command, may_fail=True)


class Job:
    """torchrun on some machines."""

    def __init__(self, processes: Mapping[Machine, Process]) -> None:
        self.processes = processes

    @property
    def returncodes(self) -> list[int | None]:
        return [each.returncode for each in self.processes.values()]

    def wait(self, timeout_s: float) -> list[str]:
        """Return what each machine printed when all torchruns have ended; then nothing that they started runs."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes.values():
                process.wait(max(deadline - time.monotonic(), 0.0))
        except AssertionError as error:
            raise AssertionError(f"{error}\nof all machines:\n" + "\n".join(self._tails())) from None
        finally:
            for machine in self.processes:
                machine.end_processes()
        return [process.output for process in self.processes.values()]

    def _tails(self) -> list[str]:
        return [f"--- {machine.name}\n{process.output[-4000:]}" for machine, process in self.processes.items()]


class Lab:
    """So many machines, which are connected to one switch; made and removed by ``with``."""

    def __init__(self, machines: int) -> None:
        self._count, self._identities = machines, 0
        self.machines: list[Machine] = []

    def __enter__(self) -> Self:
        if reason := missing():
            pytest.skip(reason)
        command = ["unshare", "--net", "--mount", "bash", "-c", _SWITCH + _IDLE, "bash", LOCAL]
        self._switch, self.pid = _started(command)
        self.inside = ("nsenter", f"--target={self.pid}", "--net", "--mount", "--")
        self.folder = Path(f"/proc/{self.pid}/root{LOCAL}")
        try:
            for slot in range(self._count):
                for name in ("shm", "disk"):
                    (self.folder / str(slot) / name).mkdir(parents=True)
                    self.run("mount", "-t", "tmpfs", name, f"{LOCAL}/{slot}/{name}")
                self.machines.append(Machine(self, slot))
            for machine in self.machines:
                machine._boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for machine in self.machines:
                machine.kill()
        finally:
            self._switch.communicate(timeout=_SECONDS)  # its input ends, and so does it

    def torchrun(self, program: Sequence[str], machines: Sequence[int] | None = None) -> Job:
        """Start torchrun on each of these machines (all), as users do, with one rank each; the first is the master."""
        chosen = [self.machines[each] for each in (range(self._count) if machines is None else machines)]
        size = (f"--nnodes={len(chosen)}", "--nproc-per-node=1")
        processes = {}
        for rank, machine in enumerate(chosen):
            meet = [f"--node-rank={rank}", f"--master-addr={chosen[0].address}", f"--master-port={PORT}"]
            command = [sys.executable, "-m", "torch.distributed.run", *size, *meet, *program]
            processes[machine] = machine.start(command)
        return Job(processes)

    def run(self, *command: str, may_fail: bool = False) -> None:
        """Run a command where the switch is."""
        _run(*self.inside, *command, may_fail=may_fail)

    def new_identity(self) -> tuple[str, str]:
        """Return a host name and an address that no machine of the lab has had."""
        self._identities += 1
        return f"machine{self._identities - 1}", f"10.77.0.{self._identities}"

    def write_hosts(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{each.address} {each.name}" for each in self.machines)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")


@functools.cache
def missing() -> str:
    """Return why no lab can be made here, or nothing."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or absent or not LOCAL:
        needs = (
            f"lacks {', '.join(absent)}" if absent else "is not root" if LOCAL else "has no empty folder to mount at"
        )
        return f"a lab of machines cannot be made: this user {needs}"
    tried = subprocess.run([*_MACHINE, "sh", "-c", _PROBE], capture_output=True, text=True, timeout=_SECONDS)
    return f"a lab of machines cannot be made: {tried.stderr.strip()}" if tried.returncode else ""


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, as this host has them; none if it is gone."""
    try:
        threads = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(each) for each in " ".join(threads).split()]
    except OSError:
        return []


def _variables() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": "/run", "PYTHONUNBUFFERED": "1"}
    return {**found, **ours, "PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), found.get("PYTHONPATH"))))}


def _started(command: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start the first process of something, which says its id when all is there."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the lab cannot be set up: {process.communicate(timeout=_SECONDS)[1]}")
    return process, int(line)


def _run(*command: str, may_fail: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    assert may_fail or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
