"""Recipes of the manual that need neither host nor kernel, carried out as written."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys

import pytest
import yaml

from distmagic.request.hosts import Host
from distmagic.transports.ssh.config import resolve
from tests import REPOSITORY

HELP = REPOSITORY / "distmagic" / "help"


def block(page: str, words: str) -> str:
    """Return the only block of plain text of a page with these words in it."""
    text = (HELP / f"{page}.md").read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (one,) = [text for language, text in found if not language and words in text]
    return one


@pytest.mark.parametrize(
    ("page", "words", "host", "expected"),
    [
        ("howto-hosts", "cluster_key", "gpu-b", ("", "bastion", "cluster_key")),
        ("howto-hosts", "my-key.pem", "gpu-a", ("ubuntu", "", "my-key.pem")),
        ("ssh", "somebody-else", "gpu-b", ("somebody-else", "bastion", "")),
    ],
)
def test_ssh_configurations_of_recipes_lead_to_the_host(
    page, words, host, expected, tmp_path
):
    path = tmp_path / "config"
    path.write_text(block(page, words))
    user, jump, key = expected
    found = resolve(Host(name=host), str(path))
    assert found.warnings == ()
    assert found.user == user or not user
    assert [one.name for one in found.jumps] == [jump] * bool(jump)
    if key:
        assert found.identity_files[0].endswith(f"/.ssh/{key}")
    if jump:
        way = resolve(found.jumps[0], str(path))
        assert (way.hostname, way.user) == ("bastion.example.org", "me")
        assert way.identity_files[0].endswith("/.ssh/bastion_key")


def test_a_port_is_tried_by_hand_from_one_host_to_another():
    listens, dials = block("howto-hosts", "s.accept").splitlines()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ready = "s = socket.create_server(('', 29500)); "
    assert ready in listens
    listens = listens.replace(ready, f"{ready}print(flush=True); ")
    first, second = (
        shlex.split(line.replace("29500", str(port)).replace("gpu-a", "127.0.0.1"), comments=True)
        for line in (listens, dials)
    )  # fmt: skip
    with subprocess.Popen(
        [sys.executable, *first[1:]], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "\n"
        subprocess.run([sys.executable, *second[1:]], check=True)
        assert process.stdout.readline().startswith("('127.0.0.1', ")
    assert process.returncode == 0


def test_resources_of_a_sky_task_are_yaml():
    assert yaml.safe_load(block("sky", "cpus: 8+")) == {"resources": {"cpus": "8+"}}
