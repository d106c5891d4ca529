"""A run as a workflow of OSMO: what it can't have, and what the workflow carries."""

import base64
import os
from functools import partial

import pytest
import yaml

from distmagic.errors import UsageError
from distmagic.payload.pack import pack_call
from distmagic.remote.wire import protocol
from distmagic.request import flags
from distmagic.systems.osmo import export as workflows
from distmagic.systems.osmo import osmo as program
from distmagic.systems.osmo import run as osmo
from tests.builders.osmo_rules import rules_broken

TERMS = protocol.JobTerms(lease_s=60.0, timeout_s=3600)


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    """Have a program `osmo`, and a home of this test's own."""
    monkeypatch.setattr(program, "check", lambda: None)
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))


def request_of(line):
    return flags.parse_line(f"--on osmo {line}", flags.Defaults())


def packed():
    return pack_call(dict, limit_bytes=1 << 30, labels={}, title="dict()")


@pytest.mark.parametrize(
    "line",
    [
        "--detach",
        "--hang-timeout 10m",
        "--fetch a",
        "--devices 0",
        "--cwd /a",
        "--python a=/p",
        "--nnodes 1:2",
        "--results kept",
    ],
)  # fmt: skip
def test_what_a_run_on_osmo_can_not_have(line, golden):
    with golden.raises(UsageError):
        osmo.check(request_of(line))


@pytest.mark.parametrize(
    "line",
    [
        "--hosts a",
        "--dry-run",
        "--idle 5m",
        "--background",
        "--cold",
        "--fresh",
        "--warm-idle 5m",
        "--node-lost-after 5",
        "--on-disconnect keep",
        "--ssh-config f",
        "--connect-timeout 5",
        "--partition gpu",
        "--nodes 0",
        "--image 'a b'",
    ],
)
def test_a_wrong_line_is_told_at_once(line, golden):
    with golden.raises(UsageError):
        request_of(line)


def test_a_secret_never_comes_into_a_workflow(golden):
    with golden.raises(UsageError):
        osmo._job(request_of("--env HF_TOKEN=x --env PLAIN=y"), packed(), TERMS)


def test_ranks_have_to_be_a_number(golden):
    job = osmo._job(request_of("--nproc-per-node gpu"), packed(), TERMS)
    with golden.raises(UsageError):
        workflows.workflow(job)


def test_a_workflow_carries_the_call_the_bundle_and_one_message_for_all_tasks():
    payload = packed()
    line = "--nodes 3 --nproc-per-node 2 --gpus-per-node L40:2 --timeout 1h --env 'A={{x}}'"
    job = osmo._job(request_of(line), payload, TERMS)
    text = workflows.workflow(job)
    assert rules_broken(text) == []
    workflow = yaml.safe_load(text)["workflow"]
    tasks = workflow["groups"][0]["tasks"]
    assert [task["name"] for task in tasks] == ["master", "worker-1", "worker-2"]
    assert workflow["resources"]["default"] == {"gpu": 2, "platform": "L40"}
    files = {
        file["path"].removeprefix("/tmp/distmagic/program/"): base64.b64decode(file["contents"])
        for file in tasks[2]["files"]
    }  # fmt: skip
    assert {"start", "distmagic.zip", payload.call.blob.sha256} <= set(files)
    _, start = protocol.decode(files["start"])
    assert start.hosts == ("master", "worker-1", "worker-2")
    assert start.terms.timeout_s == 3600
    assert (start.call, start.code) == (
        payload.call.blob.sha256,
        payload.code.blob.sha256,
    )
    node = files["/tmp/distmagic/node.sh"].decode()
    assert "export A='{{x}}'" in node
    assert "--nnodes=3" in node
    assert "--nproc-per-node=2" in node


def test_data_that_is_too_large_for_a_file_of_a_workflow_is_refused(golden):
    call = partial(len, os.urandom(2 << 20))
    payload = pack_call(call, limit_bytes=1 << 30, labels={}, title="")
    with golden.raises(UsageError):
        workflows.workflow(osmo._job(request_of("--nodes 2"), payload, TERMS))
