"""What a host notes of its jobs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from distmagic.remote.records import journal, listing, places
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol as p
from tests.builders.messages import START, TERMS


def test_an_elastic_job_s_hosts_are_noted_as_they_come(tmp_path):
    listing.remember(tmp_path, replace(START, hosts=("a", "b")))
    before = json.loads((tmp_path / listing.FILE).read_text())
    listing.note_hosts(tmp_path, ("a", "b", "c"))
    assert json.loads((tmp_path / listing.FILE).read_text()) == {
        **before,
        "hosts": ["a", "b", "c"],
    }
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["began", listing.FILE, "work_dir"]


def test_what_can_not_be_noted_makes_no_job_fail(tmp_path):
    listing.note_hosts(tmp_path / "gone", ("a",))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / listing.FILE).write_text("torn")
    listing.note_hosts(tmp_path, ("a",))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's directory of all that is kept."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    return tmp_path


def noted(start: p.StartNode) -> Path:
    """Note a job, and return its folder."""
    folder = places.job_dir(start.job, start.node_rank)
    folder.mkdir(parents=True)
    listing.remember(folder, start)
    (folder / journal.FILE).touch()
    return folder


def test_all_terms_of_a_job_are_listed_as_they_were_decided(home):
    noted(replace(START, terms=TERMS))
    (listed,) = listing.jobs()
    assert (listed.terms, listed.hosts, listed.is_running) == (
        TERMS,
        START.hosts,
        False,
    )


@pytest.mark.parametrize("number", [None, 1, p.PROTOCOL + 1])
def test_a_job_of_another_version_is_listed_and_its_agent_is_not_spoken_to(
    home, number
):
    """The number was not written down by the first version."""
    folder = noted(START)
    about = {
        **json.loads((folder / listing.FILE).read_text()),
        "protocol": number,
        "terms": "in another form",
    }
    if number is None:
        del about["protocol"]
    (folder / listing.FILE).write_text(json.dumps(about))
    assert [(one.job, one.hosts, one.protocol) for one in listing.jobs()] == [
        ("j-1", START.hosts, number or 1)
    ]
    with pytest.raises(ValueError) as caught:
        listing.check_protocol("j-1", START.node_rank)
    assert str(caught.value) == p.another_version("j-1", number or 1)


@pytest.mark.parametrize(
    "text",
    ["", "torn", "[]", '{"protocol": 3}', '{"protocol": "x"}', '{"protocol": [2]}'],
)
def test_a_job_file_that_is_none_is_left_out(home, text):
    (noted(START) / listing.FILE).write_text(text)
    assert list(listing.jobs()) == []
    listing.check_protocol("j-1", START.node_rank)


def progress(**values: float) -> p.Progress:
    return p.Progress(
        rank=0,
        restart=0,
        at_s=1.0,
        points=p.points_of([p.MetricRow(at_s=1.0, metrics=values)]),
    )


def written_by_agent(folder: Path, *events: p.Message) -> journal.Journal:
    """Return a node's journal, as its agent writes it, with these events in it."""
    made = journal.Journal(folder)
    for event in events:
        made.add(event)
    return made


def test_what_a_rank_has_reported_last_is_listed(home):
    """The agent's own journal has it, in which file it may; also when the job is over."""
    folder = noted(START)
    quiet = replace(progress(), points={})
    lines = (progress(loss=2.0), progress(loss=1.0), p.Notice(text="x"), quiet)
    written = written_by_agent(folder, *lines)
    with (folder / journal.CHATTER_FILE).open("ab") as file:
        file.write(b'{"t":"progress","n":9,"ra')
    (listed,) = listing.jobs()
    assert listed.reported.metrics == {"loss": 1.0}, (
        "a line that is being written is none yet"
    )
    assert listed.reason == ""
    written.add(p.Final(reason="done"))
    (listed,) = listing.jobs()
    assert (listed.reason, listed.reported.metrics) == ("done", {"loss": 1.0})


def test_of_many_metrics_a_few_are_listed(home):
    folder = noted(START)
    many = {f"m{number}": float(number) for number in range(100)}
    written_by_agent(folder, progress(**many))
    (listed,) = listing.jobs()
    assert list(listed.reported.metrics) == ["m0", "m1", "m2", "m3"]


def test_what_is_removed_for_an_owner_is_that_owner_s(home):
    folder = noted(replace(START, terms=replace(TERMS, owner="bob@x:/b.ipynb")))
    assert listing.remove(START.job, "ann@x:/b.ipynb") == 0
    assert folder.exists()
    assert listing.remove(START.job, "bob@x:/b.ipynb") > 0
    assert not folder.exists()
    unknown = noted(START)
    (unknown / listing.FILE).write_text("torn")
    assert listing.remove(START.job, "ann@x:/b.ipynb") == 0
    assert listing.remove(START.job) > 0


def test_a_job_that_another_host_of_the_home_removes_just_now_stops_neither_list_nor_removal(
    home, monkeypatch
):
    """Its folder goes between the moment in which it was there and the moment in which it is read."""
    listdir = os.listdir
    gone = []

    def removed_first(path="."):
        if not gone and str(path).endswith(f"jobs/{START.job}"):
            gone.append(path)
            shutil.rmtree(path)
        return listdir(path)

    for look in (lambda: list(listing.jobs()), partial(listing.remove, START.job)):
        noted(START)
        gone.clear()
        monkeypatch.setattr(os, "listdir", removed_first)
        assert not look()
        assert gone, "it was there when it was looked for"
        monkeypatch.setattr(os, "listdir", listdir)


def test_what_can_not_be_read_just_now_is_not_taken_for_nothing(home, monkeypatch):
    """As where the server of a home is away: what is there may be in use."""
    noted(START)

    def stale(path="."):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(os, "listdir", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        listing.remove(START.job)


def test_how_long_a_job_runs_does_not_follow_a_clock_that_is_set(home, monkeypatch):
    """Of a job that runs its agent's own age counts, of another one the dates of its files."""
    folder = noted(START)
    (folder / journal.FILE).write_bytes(b"")
    written = (folder / listing._WORK_DIR).stat().st_mtime
    os.utime(folder / journal.FILE, (written + 90, written + 90))
    monkeypatch.setattr(time, "time", lambda: written - 3600)
    (over,) = listing.jobs()
    assert over.age_s == pytest.approx(90)
    assert 0.0 <= over.began_ago_s < 60.0, "it began just now"
    own = processes.read(os.getpid())
    monkeypatch.setattr(listing, "is_running", lambda *_: True)
    monkeypatch.setattr(listing, "agent_of", lambda *_: own)
    (runs,) = listing.jobs()
    assert 0 < runs.age_s < 3600 * 24
    assert runs.age_s == pytest.approx(processes.age_s(own), abs=5)
    assert runs.began_ago_s == runs.age_s
    monkeypatch.setattr(time, "time", lambda: written + 3600)
    monkeypatch.setattr(listing, "agent_of", lambda *_: None)
    (over,) = listing.jobs()
    assert 0.0 <= over.began_ago_s < 60.0


@pytest.mark.parametrize("set_by_s", [-3600.0, 0.0, 3600.0])
def test_when_a_job_began_does_not_follow_a_clock_that_is_set(
    home, monkeypatch, set_by_s
):
    """A fetch keeps files that were edited since then."""
    began_up_s, began_s = processes.up_s(), time.time()
    monkeypatch.setattr(processes, "up_s", lambda: began_up_s)
    noted(START)
    monkeypatch.setattr(processes, "up_s", lambda: began_up_s + 600)
    monkeypatch.setattr(time, "time", lambda: began_s + 600 + set_by_s)
    (over,) = listing.jobs()
    assert over.began_ago_s == pytest.approx(600)


@pytest.mark.parametrize("text", [None, "", "torn", "another 5.0"])
def test_when_a_job_began_that_another_start_of_its_host_has_noted(
    home, monkeypatch, text
):
    """Only the time of day goes on while a host restarts; a job is never younger than its files show."""
    folder = noted(START)
    (folder / "began").unlink()
    if text is not None:
        (folder / "began").write_text(text)
    written = (folder / listing._WORK_DIR).stat().st_mtime
    os.utime(folder / journal.FILE, (written + 90, written + 90))
    for passed_s, began_ago_s in ((3600, 3600), (-3600, 90)):
        monkeypatch.setattr(time, "time", lambda: written + passed_s)  # noqa: B023
        (over,) = listing.jobs()
        assert over.began_ago_s == pytest.approx(began_ago_s, abs=5)
