"""Files that ranks left come back from real hosts, and others go there."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.errors import NoResult, UsageError, WorkerFailed
from distmagic.request.hosts import parse_hosts
from distmagic.session.spreading import put
from tests.e2e import runner
from tests.e2e.scripts import detached, run_warm

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
    with pytest.raises(NoResult):
        found.fetch("nothing", to="back", ranks="all")
    with pytest.raises(UsageError, match="ranks='1'"):
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
