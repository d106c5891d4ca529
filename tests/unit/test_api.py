"""`distmagic.run`: its signature and help name every option, and a wrong one is answered with the nearest."""

import inspect
import re
from dataclasses import asdict, fields

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import distmagic
from distmagic import api, notebook_place
from distmagic.api import Options
from distmagic.connection.link_opener import Fleet
from distmagic.errors import UsageError, WorkerFailed
from distmagic.request import flag_table
from distmagic.request.access import Access
from distmagic.request.allocation import SlurmRequest
from distmagic.request.flag_values import options_of
from distmagic.request.hosts import parse_hosts
from distmagic.request.spec import JobSpec
from distmagic.session.inside import Inside

OWN = [
    "fn",
    "args",
    "kwargs",
    "hosts",
    "allocation",
    "access",
    "background",
    "payload_limit_bytes",
    "screen",
]
OPTIONS = {**options_of(JobSpec), **options_of(Access)}
PARAMETERS = inspect.signature(distmagic.run).parameters


class FakeSession:
    """Notes what a run asks for, and starts nothing. It is its own first links."""

    failure = None
    futures = ()
    inside = Inside("k", None)

    def reach(self, hosts, access, asker, spec=None, spare=()):
        self.hosts, self.access, self.spec = hosts, access, spec
        self.fleet = Fleet(hosts=hosts, access=access)
        return self

    def launch(
        self, reaching, spec, payload, screen, job="", variable="run", companion=None
    ):
        if self.failure is not None:
            raise self.failure
        return "the run"


@pytest.fixture
def session(monkeypatch, tmp_path):
    monkeypatch.delenv("DISTMAGIC_HOSTS", raising=False)
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    monkeypatch.setattr(
        notebook_place, "_registered", []
    )  # by notebooks of other tests
    fake = FakeSession()
    monkeypatch.setattr(api, "session", lambda: fake)
    return fake


def test_hosts_may_be_named_one_by_one(session):
    api.run(len, [], hosts=["gpu-a:4", parse_hosts("gpu-b:2")[0]])
    assert session.hosts == parse_hosts("gpu-a:4,gpu-b:2")


@pytest.mark.parametrize(
    "hosts",
    [7, {"gpu-a": 4}, ["gpu-a", 7], ["gpu-a:2", "gpu-a:4"], ["gpu-a,gpu-b"]],
    ids=str,
)
def test_what_is_no_list_of_hosts_is_said(session, hosts, golden):
    with golden.raises(UsageError):
        api.run(len, [], hosts=hosts)


def test_hosts_and_an_allocation_are_not_both_taken(session, golden):
    with golden.raises(UsageError):
        api.run(len, [], hosts="gpu-a", allocation=SlurmRequest(nodes=2))


@pytest.mark.parametrize("hosts", ["", " ", ",", [], ()])
def test_an_empty_list_of_hosts_is_refused_as_on_the_line(session, hosts, golden):
    with golden.raises(UsageError):
        api.run(len, [], hosts=hosts)


def test_of_a_run_that_fails_the_error_is_named_as_what_has_it(session, golden):
    session.failure = WorkerFailed(
        "rank 1 (gpu-a, local_rank 1) returned, but its process failed",
        "Its result is kept: run.results[1]. Its whole output: run.logs(1).",
    )
    with golden.raises(WorkerFailed):
        api.run(len, [])


def test_in_a_notebook_it_runs_where_its_cells_do(session, monkeypatch):
    place = (parse_hosts("gpu-a:1,gpu-b:1"), Access(ssh_config="of the notebook"))
    monkeypatch.setattr(notebook_place, "_registered", [lambda: place])
    distmagic.run(len, [1])
    assert [host.name for host in session.hosts] == ["gpu-a", "gpu-b"]
    assert session.access.ssh_config == "of the notebook"
    distmagic.run(len, [1], python="/opt/python")
    assert session.access.ssh_config == "of the notebook"
    assert session.access.python_of("gpu-a") == "/opt/python"
    distmagic.run(len, [1], hosts="gpu-c")
    assert [host.name for host in session.hosts] == ["gpu-c"]
    assert session.access.ssh_config is None


def test_every_option_is_a_field_a_keyword_a_parameter_and_a_flag():
    assert list(Options.__annotations__) == list(OPTIONS)
    assert list(PARAMETERS) == [*OWN, *OPTIONS]
    known = {flag.name: flag for flag in flag_table.FLAGS}
    assert len(known) == len(flag_table.FLAGS), "of one name there are two"
    for flag in OPTIONS.values():
        assert known[flag.name] == flag


def test_what_a_flag_can_t_go_with_is_known():
    words = {word for flag in flag_table.FLAGS for word in flag.not_with.split()}
    assert words == {"export", "stay", "workflow"}


def test_the_defaults_are_those_of_a_job():
    usual = JobSpec()
    assert {one.name: PARAMETERS[one.name].default for one in fields(JobSpec)} == {
        one.name: getattr(usual, one.name) for one in fields(JobSpec)
    }


def test_an_option_is_completed_and_explained_by_name(capsys):
    shell = InteractiveShell(config=Config(HistoryManager={"hist_file": ":memory:"}))
    shell.user_ns["distmagic"] = distmagic
    text = "distmagic.run(len, max_res"
    with provisionalcompleter():
        found = {one.text for one in shell.Completer.completions(text, len(text))}
    assert "max_restarts=" in found
    help(distmagic.run)
    shown = capsys.readouterr().out
    assert "max_restarts: 'int' = 0" in shown
    assert re.search(r"max_restarts +restarts of all ranks after a failure", shown)


def test_the_help_has_a_line_for_every_option():
    lines = re.findall(
        r"^    (\w+) {2,}(\S.*)", inspect.getdoc(distmagic.run), re.MULTILINE
    )
    assert [name for name, _ in lines] == [*OWN[2:], *OPTIONS]
    for name, flag in OPTIONS.items():
        assert dict(lines)[name] == (flag.argument or flag.help)


def test_the_help_tells_the_usual_times():
    usual = {**asdict(JobSpec()), **asdict(Access())}
    for name, flag in OPTIONS.items():
        told = re.search(r"\((\d+)([sm])", flag.help)
        if told is not None:
            assert int(told[1]) * {"s": 1, "m": 60}[told[2]] == usual[name]


def test_every_option_arrives(session):
    of_job = {
        "nproc_per_node": 2, "nnodes": (1, 2), "max_restarts": 3, "rdzv_backend": "c10d", "rdzv_endpoint": "a:1",
        "rdzv_id": "id", "master_port": 5, "local_addr": "b", "cwd": "/tmp", "timeout_s": 7.0, "hang_timeout_s": 8.0,
        "node_lost_after_s": 9.0, "on_disconnect": "keep",
    }  # fmt: skip
    of_access = {
        "ssh_config": "c", "ssh_command": "ssh", "connect_timeout_s": 1.0, "lease_s": 2.0, "warm_idle_s": 3.0, "cold": True
    }  # fmt: skip
    found = distmagic.run(
        len, [], hosts="gpu-a:4", env={"A": "1"}, python="/p", **of_job, **of_access
    )
    assert found == "the run"
    assert session.spec == JobSpec(env=(("A", "1"),), **of_job)
    assert session.access == Access(pythons=(("", "/p"),), **of_access)
    assert [host.name for host in session.hosts] == ["gpu-a"]
    distmagic.run(len, [], detach=True, nnodes=3)
    assert (session.spec.detach, session.spec.nnodes, session.hosts) == (
        True,
        (3, 3),
        (),
    )


def test_options_that_are_not_given_leave_access_as_it_is(session):
    way = Access(ssh_config="mine", lease_s=5.0, cold=True, pythons=(("gpu-a", "/a"),))
    distmagic.run(len, [], access=way)
    assert session.access == way
    distmagic.run(len, [], access=way, cold=False)
    assert session.access == Access(
        ssh_config="mine", lease_s=5.0, pythons=(("gpu-a", "/a"),)
    )


@pytest.mark.parametrize(
    "name", ["host", "time_out_s", "nproc", "pythons", "payload_limit", "xyz"]
)
def test_a_wrong_option_is_answered_with_the_nearest(session, name, golden):
    with golden.raises(UsageError):
        distmagic.run(len, [], **{name: 1})


def test_a_word_of_our_own_signature_is_no_option(session):
    with pytest.raises(UsageError, match="no option 'options'"):
        distmagic.sweep(len, {"x": [1]}, options=1)


def test_tab_after_distmagic_offers_what_is_public():
    assert set(dir(distmagic)) == set(distmagic.__all__)
