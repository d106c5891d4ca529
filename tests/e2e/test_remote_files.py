"""Files that ranks left come back from real hosts, and others go there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.connection.requests.remote_files import RemoteFolder
from distmagic.errors import NoResult, UsageError, WorkerFailed
from distmagic.remote.wire.protocol import Folder
from distmagic.request.hosts import parse_hosts
from distmagic.session.spreading import put
from tests.e2e import runner
from tests.e2e.scripts import detached, run_warm
from tests.lab import Lab, wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.quick
def test_files_that_ranks_left_come_back(warm_lab, project, capsys):
    (project / "save.py").write_text(
        "import os\n"
        "rank = os.environ['RANK']\n"
        "os.makedirs('ck', exist_ok=True)\n"
        "open(f'ck/rank{rank}.pt', 'wb').write(rank.encode() * 3_000_000)\n"
        "if not os.path.exists('out'): os.symlink('/etc', 'out')\n"
    )
    found = run_warm(
        warm_lab, "--fetch ck/*.pt --fetch nothing/* save.py", hosts="dm1:1,dm2:1"
    )
    said = capsys.readouterr().err
    assert "fetched ck/rank0.pt\n" in said
    assert "--fetch nothing/*: No file on dm1 fits 'nothing/*'." in said
    assert (project / "ck" / "rank0.pt").read_bytes() == b"0" * 3_000_000
    assert [file.path for file in found.files(1, "ck/**")] == ["ck/rank1.pt"]
    assert [file.path for file in found.files(1, "out/*")] == []
    (path,) = found.fetch("ck/*", to=project / "back", rank=1)
    assert path == project / "back" / "ck" / "rank1.pt"
    assert path.read_bytes() == b"1" * 3_000_000


def test_shards_of_a_failed_run_come_from_all_hosts_and_go_back_as_one(
    warm_lab, project, capsys
):
    (project / "save.py").write_text(
        "import os\n"
        "rank = os.environ['RANK']\n"
        "os.makedirs('ck', exist_ok=True)\n"
        "open(f'ck/shard{rank}', 'wb').write(rank.encode() * 9_000_000)\n"
        "if rank == '0': open('ck/.metadata', 'w').write('of rank 0')\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if rank == '1': raise SystemExit(3)\n"
        "import time; time.sleep(600)\n"
    )
    with pytest.raises(WorkerFailed) as failed:
        run_warm(warm_lab, "--fetch ck/* save.py", hosts="dm1:1,dm2:1")
    assert "fetched ck/.metadata, ck/shard0\n" in capsys.readouterr().err
    found = failed.value.run
    assert found.fetch("ck/shard*", to="back", ranks="all") == [
        Path("back/dm1/ck/shard0"),
        Path("back/dm2/ck/shard1"),
    ]
    assert found.fetch("ck/.metadata", to="back", ranks="all") == [
        Path("back/dm1/ck/.metadata")
    ]
    with pytest.raises(NoResult, match="Not all hosts gave their files"):
        found.fetch("nothing", to="back", ranks="all")
    with pytest.raises(UsageError, match="ranks='1' is not known"):
        found.fetch("ck", ranks="1")

    sources = sorted(Path("back").glob("*/ck"))
    hosts = parse_hosts("dm1,dm2,dm3")
    size = 2 * 9_000_000 + len("of rank 0")
    for _ in range(2):
        assert put(runner.reach(warm_lab, hosts), sources, "~") == (3, size)
    for host in warm_lab.hosts:
        texts = {path.name: path.read_bytes() for path in (host.home / "ck").iterdir()}
        assert texts == {
            ".metadata": b"of rank 0",
            "shard0": b"0" * 9_000_000,
            "shard1": b"1" * 9_000_000,
        }
    housekeeping = session().housekeeping
    kept = housekeeping.work_dirs(runner.reach(warm_lab, hosts))
    names = {
        name: [one.name for one in dirs if one.name.startswith("/")]
        for name, dirs in kept.items()
    }
    assert {name: len(paths) for name, paths in names.items()} == dict.fromkeys(
        ("dm1", "dm2", "dm3"), 1
    )
    reaching = runner.reach(warm_lab, hosts)
    assert housekeeping.remove_work_dirs(reaching, names) == 3 * size
    for host in warm_lab.hosts:
        assert not (host.home / "ck").exists()


def test_a_file_that_a_rank_replaces_all_the_time_comes_whole(ended, project):
    (project / "write.py").write_text(
        "import os, itertools, distmagic\n"
        "for number in itertools.count():\n"
        "    with open('snapshot.new', 'wb') as file: file.write(str(number % 10).encode() * 2_000_000)\n"
        "    os.replace('snapshot.new', 'snapshot')\n"
        "    distmagic.report(step=number + 1)\n"
        "    if os.path.exists('/tmp/enough'): break\n"
    )
    left = detached(ended, "write.py")
    reaching = runner.reach(ended, parse_hosts("dm1:1"))
    files = RemoteFolder(Folder(job=left.job), lambda: reaching.opener.link(0))
    wait_until(lambda: files.find("snapshot"), "the first snapshot")
    for number in range(3):
        (path,) = files.fetch("snapshot", project / f"back{number}")
        data = path.read_bytes()
        assert (len(data), len(set(data))) == (2_000_000, 1)
    for link in reaching.wait():
        link.close()
    ended.hosts[0].exec(["touch", "/tmp/enough"]).check_returncode()
    left.attach()
    ended.hosts[0].exec(["rm", "/tmp/enough"]).check_returncode()


def test_what_was_edited_since_a_job_began_stays_when_it_is_attached_to(ended, project):
    (project / "train.py").write_text("open('model', 'w').write('trained')\n")
    left = detached(ended, "train.py")
    (project / "train.py").write_text("edited")
    (project / "model").write_text("of mine")
    found = left.attach()
    assert [path.name for path in found.fetch("*")] == [
        "model.of-last-run",
        "train.py.of-last-run",
    ]
    assert (project / "train.py").read_text() == "edited"
    assert (project / "model.of-last-run").read_text() == "trained"


def folder_on(lab: Lab, host: str, path: str) -> RemoteFolder:
    """Return a folder of a host, as `%distributed get` and `put` have it."""
    return session().housekeeping.folder(runner.reach(lab, parse_hosts(host)), path)


HOSTILE_NAMES = [b"plain", b"no utf-8 \xff", b"a\nline", b"\x1b[31mred", b"$(id) 'x'"]


@pytest.mark.quick
def test_files_of_any_name_go_to_a_host_and_come_back(ended, tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    for name in HOSTILE_NAMES:
        (source / "deep" / os.fsdecode(name)).write_bytes(name)
    (source / "loop").symlink_to(source)
    sent = folder_on(ended, "dm2", "in").send(source)
    assert sorted(sent) == sorted(
        f"source/deep/{os.fsdecode(name)}" for name in HOSTILE_NAMES
    )
    there = ended.hosts[1].home / "in" / "source" / "deep"
    assert sorted(os.listdir(os.fsencode(there))) == sorted(HOSTILE_NAMES)
    paths = folder_on(ended, "dm2", "~").fetch("in/source", tmp_path / "back")
    assert sorted(path.read_bytes() for path in paths) == sorted(HOSTILE_NAMES)
    assert sorted(os.fsencode(path.name) for path in paths) == sorted(HOSTILE_NAMES)


class BreaksOnce:
    """Ends the SSH session of a host while a file is on its way, once."""

    def __init__(self, lab: Lab, at_bytes: int) -> None:
        self._lab, self._at_bytes = lab, at_bytes
        self.asked_from: list[int] = []

    def break_at(self, offset: int, done: int) -> None:
        """End all contacts of the host when the first transfer is so far."""
        if len(self.asked_from) == 1 and done - offset > self._at_bytes:
            self._at_bytes = 1 << 60
            for contact in self._lab.hosts[1].processes():
                if contact.cmdline[1:3] == ("-u", "-c"):
                    self._lab.hosts[1].exec(["kill", "-9", str(contact.ppid)])


@pytest.mark.parametrize("way", ["get", "put"])
def test_a_large_file_goes_on_where_its_connection_broke(
    ended, tmp_path, monkeypatch, way
):
    from distmagic.connection.requests import remote_files

    breaks = BreaksOnce(ended, 20_000_000)

    class WatchedLine(remote_files.ProgressLine):
        def begin_at(self, size_bytes: int) -> None:
            super().begin_at(size_bytes)
            breaks.asked_from.append(size_bytes)

        def add(self, size_bytes: int) -> None:
            super().add(size_bytes)
            breaks.break_at(breaks.asked_from[-1], self._done_bytes)

    monkeypatch.setattr(remote_files, "ProgressLine", WatchedLine)
    data = os.urandom(1 << 20) * 64
    if way == "get":
        (ended.hosts[1].home / "big.bin").write_bytes(data)
        (path,) = folder_on(ended, "dm2", "~").fetch("big.bin", tmp_path)
    else:
        (tmp_path / "big.bin").write_bytes(data)
        folder_on(ended, "dm2", "~").send(tmp_path / "big.bin")
        path = ended.hosts[1].home / "big.bin"
    assert path.read_bytes() == data
    assert len(breaks.asked_from) == 2
    assert breaks.asked_from[0] == 0
    assert breaks.asked_from[1] > 10_000_000
    path.unlink()
