"""Each way to run the job of work.py on 2 hosts x 2 ranks, or on one host with 4 where a tool can't do more.

One context manager a tool, used as its own documentation says; what it yields runs the job once and says how long.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.bench import REPOSITORY
from tests.bench.kernels import OWN_PROCESSES, Kernel, Ran
from tests.bench.peers import Peers
from tests.bench.work import SOURCE, Stamps
from tests.lab import Lab, wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds from the start (of the cell, or of the command) to the last rank's first user line, and to the end."""

    first_s: float
    end_s: float


Contestant = Callable[[], Took]
# Before the second cell a user looks at the first one, and its warm processes are done with what they put off.
READING = "import time; time.sleep(2)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where all of them run: a lab of two hosts, a folder that hosts and notebook see, an environment."""

    lab: Lab
    folder: Path
    peers: Peers | None = None  # the other tools; None where none is run

    def stamps(self) -> Stamps:
        """Return a folder for one run."""
        return Stamps(self.folder)

    @property
    def env(self) -> dict[str, str]:
        """The environment of every kernel; byte code is kept, as of any installed package."""
        own = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONDONTWRITEBYTECODE"
        }
        return {
            **own, "PYTHONPATH": str(REPOSITORY), "DISTMAGIC_HOME": str(self.folder / "home"),
            "IPYTHONDIR": str(self.folder / "ipython"), "JPY_PARENT_PID": "",
        }  # fmt: skip

    @property
    def peers_env(self) -> dict[str, str]:
        """The same for a peer's kernel: it has its own packages only, and finds its own programs first."""
        own = {
            name: value
            for name, value in self.env.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        assert self.peers is not None
        return {**own, "PATH": f"{self.peers.bin}{os.pathsep}{os.environ['PATH']}"}

    @contextlib.contextmanager
    def peer_kernel(self, prepare: str) -> Iterator[Kernel]:
        """Start a kernel of the peers' Python, in which `prepare` has run."""
        assert self.peers is not None
        with Kernel(
            self.peers.python, self.folder, self.peers_env, OWN_PROCESSES
        ) as kernel:
            kernel.run(prepare + SOURCE)
            yield kernel


def _took(ran: Ran, stamps: Stamps) -> Took:
    return Took(first_s=stamps.last_at() - ran.began_at, end_s=ran.took_s)


def _port() -> int:
    return random.randint(20000, 30000)


# ---- by hand


@contextlib.contextmanager
def by_hand(place: Place) -> Iterator[Contestant]:
    """Run `ssh host torchrun` on both hosts at the same time, with a script that lies there already."""
    script = place.folder / "script.py"
    script.write_text(f"{SOURCE}\nimport sys\nwork(sys.argv[1])\n")
    hosts = place.lab.hosts

    def run() -> Took:
        stamps, port, began_at, began = (
            place.stamps(),
            _port(),
            time.time(),
            time.monotonic(),
        )
        clients = [
            subprocess.Popen(
                ["ssh", "-F", str(place.lab.ssh_config), host.name, "python3", "-m", "torch.distributed.run",
                 f"--nnodes={len(hosts)}", f"--node-rank={i}", "--nproc-per-node=2",
                 f"--master-addr={hosts[0].address}", f"--master-port={port}", str(script), str(stamps.folder)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for i, host in enumerate(hosts)
        ]  # fmt: skip
        said = [client.communicate(timeout=120)[1] for client in clients]
        end_s = time.monotonic() - began
        assert not any(client.returncode for client in clients), said
        return Took(first_s=stamps.last_at() - began_at, end_s=end_s)

    yield run


# ---- floors: what is left when there is no tool


_IMPORTS = "import torch.distributed.run"
_IMPORTS_AND_RANKS = f"""
import subprocess, sys
{_IMPORTS}
ranks = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(2)]
for rank in ranks:
    rank.wait()
"""
_FORKS = f"""
{SOURCE}
import json, sys
for line in sys.stdin:
    start = json.loads(line)
    ranks = []
    for number in start["numbers"]:
        ranks.append(os.fork())
        if not ranks[-1]:
            work(start["folder"], RANK=number, **start["env"])
            os._exit(0)
    for rank in ranks:
        os.waitpid(rank, 0)
    print(flush=True)
"""


@contextlib.contextmanager
def imports(place: Place) -> Iterator[Contestant]:
    """Import torch in one new process on each host, as any start without a warm process must."""
    yield lambda: _by_ssh(place, _IMPORTS)


@contextlib.contextmanager
def imports_and_ranks(place: Place) -> Iterator[Contestant]:
    """Import torch in one new process on each host, and then in two, as any start of new processes by torchrun must."""
    yield lambda: _by_ssh(place, _IMPORTS_AND_RANKS)


@contextlib.contextmanager
def forks(place: Place) -> Iterator[Contestant]:
    """Have a Python on each host, which has torch, fork two ranks when it reads a line, and write one at their end."""
    hosts = place.lab.hosts
    script = place.folder / "forks.py"
    script.write_text(_FORKS)
    with contextlib.ExitStack() as stack:
        there = [
            stack.enter_context(
                subprocess.Popen(
                    ["ssh", "-F", str(place.lab.ssh_config), host.name, "python3", "-u", str(script)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for host in hosts
        ]  # fmt: skip

        def run() -> Took:
            stamps, port = place.stamps(), _port()
            env = {
                "WORLD_SIZE": 4,
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": port,
            }
            began_at, began = time.time(), time.monotonic()
            for number, one in enumerate(there):
                start = {
                    "folder": str(stamps.folder),
                    "env": env,
                    "numbers": [2 * number, 2 * number + 1],
                }
                assert one.stdin is not None
                one.stdin.write(json.dumps(start) + "\n")
                one.stdin.flush()
            for one in there:
                assert one.stdout is not None
                assert one.stdout.readline() == "\n"
            end_s = time.monotonic() - began
            return Took(first_s=stamps.last_at() - began_at, end_s=end_s)

        run()
        yield run


def _by_ssh(place: Place, program: str) -> Took:
    """Run a Python program on all hosts at the same time."""
    began = time.monotonic()
    clients = [
        subprocess.Popen(
            ["ssh", "-F", str(place.lab.ssh_config), host.name, "python3", "-"],
            stdin=subprocess.PIPE, text=True,
        )
        for host in place.lab.hosts
    ]  # fmt: skip
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(program)
        client.stdin.close()
    assert [client.wait(120) for client in clients] == [0] * len(clients)
    took_s = time.monotonic() - began
    return Took(first_s=took_s, end_s=took_s)


# ---- distmagic


def magic_line(place: Place, *flags: str) -> str:
    """Return the first line of distmagic's cell."""
    hosts = ",".join(f"{host.name}:2" for host in place.lab.hosts)
    return f"%%distributed --ssh-config {place.lab.ssh_config} --hosts {hosts} {' '.join(flags)}".rstrip()


@contextlib.contextmanager
def own_kernel(place: Place) -> Iterator[tuple[Kernel, Callable[..., Took]]]:
    """Start a kernel of its own, and yield it with a function that runs a cell; it takes the cell's flags.

    As in the kernels of the other tools, the function and what it imports came in a cell before. Nothing of it is left
    on the hosts.
    """
    import sys

    with Kernel(sys.executable, place.folder, place.env) as kernel:
        kernel.run("%load_ext distmagic")
        kernel.run(SOURCE)

        def run(*flags: str) -> Took:
            stamps = place.stamps()
            ran = kernel.run(
                f"{magic_line(place, *flags)}\nwork({str(stamps.folder)!r})"
            )
            return _took(ran, stamps)

        yield kernel, run
        kernel.run("%distributed down")
    place.lab.assert_clean(within_s=30)


@contextlib.contextmanager
def staying(place: Place) -> Iterator[Contestant]:
    """Run a cell on ranks that stay, which a cell before has started."""
    import sys

    with Kernel(sys.executable, place.folder, place.env) as kernel:
        kernel.run("%load_ext distmagic")
        kernel.run(SOURCE)
        line = magic_line(place).replace("%%distributed", "%%ranks")
        kernel.run(f"{line}\nwork({str(place.stamps().folder)!r}, group='kept')")
        yield lambda: _run_in(place, kernel, "%%ranks\nwork({folder!r}, group='kept')")
        kernel.run("%distributed end ranks")
        kernel.run("%distributed down")
    place.lab.assert_clean(within_s=30)


# ---- the others


@contextlib.contextmanager
def round_trip(place: Place) -> Iterator[Contestant]:
    """Send a line to a host over a connection of ssh that is there already, and read it back."""
    ssh = ["ssh", "-F", str(place.lab.ssh_config), place.lab.hosts[0].name, "cat"]
    with subprocess.Popen(ssh, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as there:

        def run() -> Took:
            assert there.stdin is not None
            assert there.stdout is not None
            began = time.monotonic()
            there.stdin.write(b"\n")
            there.stdin.flush()
            assert there.stdout.readline() == b"\n"
            took_s = time.monotonic() - began
            return Took(first_s=took_s, end_s=took_s)

        run()
        yield run


@contextlib.contextmanager
def torchrunx(place: Place) -> Iterator[Contestant]:
    """Run a Launcher with two hosts; the folder is the shared file system that it asks for."""
    launcher = (
        f"import torchrunx\nlauncher = torchrunx.Launcher(hostnames={[host.name for host in place.lab.hosts]!r}, "
        f"workers_per_host=2, backend='gloo', ssh_config_file={str(place.lab.ssh_config)!r})\n"
    )
    with place.peer_kernel(launcher) as kernel:
        yield lambda: _run_in(place, kernel, "launcher.run(work, {folder!r})")


@contextlib.contextmanager
def accelerate(place: Place) -> Iterator[Contestant]:
    """Run notebook_launcher: one host, the notebook's own, with four processes."""
    with place.peer_kernel("from accelerate import notebook_launcher\n") as kernel:
        call = (
            "notebook_launcher(work, ({folder!r},), num_processes=4, use_port='{port}')"
        )
        yield lambda: _run_in(place, kernel, call)


@contextlib.contextmanager
def nbdistributed(place: Place) -> Iterator[Contestant]:
    """Run a cell on the four workers, on the notebook's own host, that `%dist_init` has started before."""
    with place.peer_kernel("") as kernel:
        kernel.run("%load_ext nbdistributed")
        kernel.run("%dist_init -n 4")
        # A cell that comes before its workers are listening is lost, and waits for 30 s.
        for _ in range(3):
            if "Timeout" not in (shown := kernel.run(f"%%distributed\n{SOURCE}").shown):
                break
        else:
            raise AssertionError(f"its workers don't answer: {shown}")
        yield lambda: _run_in(
            place, kernel, "%%distributed\nwork({folder!r}, group='kept', RANK=rank)"
        )


@contextlib.contextmanager
def ipyparallel(place: Place) -> Iterator[Contestant]:
    """Run a %%px cell on engines, two a host, that are there already and have the group of the first round."""
    assert place.peers is not None
    connection = place.folder / "ipp" / "security" / "ipcontroller-engine.json"
    env = {**place.peers_env, "IPYTHONDIR": str(place.folder / "ipython-of-ipp")}
    controller = [str(place.peers.bin / "ipcontroller"), f"--profile-dir={place.folder / 'ipp'}", "--ip=*",
                  f"--location={place.lab.address}"]  # fmt: skip
    ssh = ["ssh", "-F", str(place.lab.ssh_config)]
    engine = [str(place.peers.bin / "ipengine"), f"--file={connection}"]
    with contextlib.ExitStack() as stack:
        _background(stack, [*OWN_PROCESSES, *controller], env)
        wait_until(connection.exists, "ipyparallel's controller")
        for host in place.lab.hosts:
            for _ in range(2):
                # -tt: the engine ends with its client.
                _background(stack, [*ssh, "-tt", host.name, *engine], env)
        client = str(connection.with_name("ipcontroller-client.json"))
        connect = (
            f"import ipyparallel as ipp\nrc = ipp.Client({client!r})\n"
            "rc.wait_for_engines(4, timeout=60)\nview = rc[:]\nview.block = True\nview.activate()\n"
        )
        kernel = stack.enter_context(place.peer_kernel(connect))
        first = place.lab.hosts[0]
        kernel.run(
            "import socket\n"
            "def update(env):\n    import os\n    os.environ.update(env)\n"
            f"env = {{'WORLD_SIZE': '4', 'MASTER_ADDR': {first.address!r}, 'MASTER_PORT': '{_port()}'}}\n"
            "names = view.apply_sync(socket.gethostname)\n"
            f"ids = sorted(range(4), key=lambda i: (names[i] != {first.name!r}, i))\n"
            "for rank, i in enumerate(ids):\n"
            "    rc[i].apply_sync(update, {**env, 'RANK': str(rank)})"
        )
        kernel.run(f"%%px\n{SOURCE}")
        yield lambda: _run_in(place, kernel, "%%px\nwork({folder!r}, group='kept')")


def _run_in(place: Place, kernel: Kernel, call: str) -> Took:
    stamps = place.stamps()
    ran = kernel.run(call.format(folder=str(stamps.folder), port=_port()), timeout_s=90)
    try:
        return _took(ran, stamps)
    except AssertionError as error:  # a cell that is green all the same
        raise AssertionError(f"{error}; the cell shows: {ran.shown[-300:]}") from None


def _background(
    stack: contextlib.ExitStack, argv: list[str], env: dict[str, str]
) -> None:
    """Run a program until the stack is left."""
    child = subprocess.Popen(
        argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None
    stack.callback(child.stdin.close)
    stack.callback(child.wait)
    stack.callback(child.kill)


@contextlib.contextmanager
def own_name(address: str, names: dict[str, str], folder: Path) -> Iterator[str]:
    """Have this machine's own name mean `address` in this process's /etc/hosts; yield the line that says so.

    Tools that the hosts call back tell them `socket.getfqdn()`. Only for a process that called `isolate`.
    """
    line = f"{address}\t{socket.gethostname()}\n"
    others = "".join(f"{other}\t{name}\n" for name, other in names.items())
    hosts = folder / "etc-hosts"
    hosts.write_text(f"127.0.0.1\tlocalhost\n{line}{others}")
    subprocess.run(["mount", "-n", "--bind", str(hosts), "/etc/hosts"], check=True)
    try:
        yield line
    finally:
        subprocess.run(["umount", "-n", "/etc/hosts"], check=True)
