"""A system that somebody else brings by an entry point: hosts, a folder, a place inside a job, the Tab key and the help."""

from __future__ import annotations

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import AllocationEnded, UsageError, WorkerFailed
from distmagic.exports import systems as exports
from distmagic.inside.detect import detect
from distmagic.notebook import help_pages
from distmagic.notebook.completion import Completer
from distmagic.request import flag_parser, systems
from distmagic.request.access import Access
from distmagic.request.flags import Defaults, Request, parse_line
from distmagic.session import dry_run
from distmagic.session.session import Session
from tests.builders.exports import job, texts
from tests.builders.own_systems import TOY, installed

ASKER = NotebookAsker(can_ask=False)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    with installed(tmp_path, monkeypatch, TOY):
        yield


@pytest.fixture
def session(toy):
    made = Session()
    yield made
    made.close()


def parse(line: str) -> Request:
    return parse_line(line, Defaults())


def test_its_hosts_are_reached_and_given_back(session):
    whole = parse("--on toy --nodes 2")
    request = whole.allocation
    assert (request.system, request.nodes) == ("toy", 2)
    assert dry_run.preview(whole) == "toy shelve --nodes 2"
    held = session.allocations.get(request, Access(), ASKER, "me")
    assert session.allocations.get(request, Access(), ASKER, "me") is held
    told: list[str] = []
    hosts = held.wait(ASKER, told.append)
    assert told == ["The toys are on their way."]
    assert [host.name for host in hosts] == ["toy-0", "toy-1"]
    assert hosts[0].by_hand() == "toy exec toy-0"
    reaching = session.reach(hosts, Access(), ASKER)
    assert session.housekeeping.jobs(reaching) == ()
    assert reaching.absent == {}
    error = WorkerFailed("rank 0 failed.", "Its output.", "")
    session.allocations.advise(hosts, error)
    assert error.hint == "Ask the toys.\nIts output."
    session.down()
    with pytest.raises(AllocationEnded) as caught:
        session._connect(hosts[0], Access(), ASKER)
    assert str(caught.value) == "The toys were put away.\nRun the cell again."


def test_what_it_has_is_listed(session):
    request = parse("--on toy --nodes 2").allocation
    session.allocations.get(request, Access(), ASKER, "me")
    listed = session.allocations.pool("toy").listed(request, Access(), ASKER)
    assert listed == [("shelf", "nodes"), ("toy shelf new", "2")]
    assert parse("--on toy:mine").allocation.is_there


def test_its_errors_are_its_own(toy):
    with pytest.raises(UsageError) as caught:
        parse("--on toy --partition large")
    assert caught.value.message == "--partition means nothing to a toy."


def test_a_job_is_exported_for_it(toy, tmp_path):
    request = parse("--export toy somewhere --nodes 2").export
    files = texts(exports.files(job(request.system, nodes=2)))
    assert "--master-addr=toy-0" in files["toy.sh"]
    assert "`toy shelve --nodes 2 toy.sh` starts it." in files["README.md"]


def test_a_process_is_found_inside_a_job_of_it_before_the_systems_below(toy):
    place = detect(
        {"TOY_NODE": "1", "TOY_NODES": "2", "TOY_LEAD": "toy-0", "SLURM_JOB_ID": "7"}
    )
    assert (place.system, place.node_rank, place.nnodes) == ("Toy job 1", 1, 2)


def test_help_and_the_tab_key_offer_it(toy):
    text = " ".join(flag_parser.help_text().split())
    assert "toy: a new shelf; toy:SHELF: one that is there; none:" in text
    assert "sing, torchrun, toy" in text
    completer = Completer(hosts=lambda: (), jobs=lambda: ())
    assert "toy" in completer.candidates("%%distributed --on ")
    assert "toy" in completer.candidates("%%distributed --export ")


def test_its_page_is_one_of_the_manual(toy):
    assert "toys" in help_pages.topics()
    assert "How nodes are put on a shelf." in help_pages.contents()
    with pytest.raises(UsageError) as caught:
        parse("--on toy --partition large")
    assert "%distributed help toys" in caught.value.hint


def test_every_system_of_ours_has_a_page():
    for system in systems.systems():
        assert system.page in help_pages.topics()


def test_without_the_package_there_is_no_such_system():
    for line in ("--on toy", "--export toy somewhere"):
        with pytest.raises(UsageError, match="'toy'"):
            parse(line)


def test_one_that_is_broken_or_has_a_name_of_ours_leaves_all_others(
    tmp_path, monkeypatch, golden
):
    known = systems.systems()
    entries = (
        "gone = tests.builders.toy_system:GONE",
        "none = distmagic.request.systems:_OWN",
        "mine = tests.unit.systems.test_own_system:SLURM",
    )
    with installed(tmp_path, monkeypatch, *entries):
        with pytest.warns(UserWarning, match=systems.GROUP) as warned:
            assert systems.systems() == known
        golden(*sorted(str(one.message) for one in warned))


SLURM = systems.System(name="slurm", title="Mine", folder="x", can=frozenset())
