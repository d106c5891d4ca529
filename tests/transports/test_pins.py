"""Host keys that are trusted when they are first seen, and hosts whose keys are kept nowhere."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distmagic.errors import HostKeyError
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports.asking import NoAsker
from tests.transports.conftest import Home
from tests.transports.sshd import Sshd, sshd

ssh = pytest.importorskip("distmagic.transports.ssh.ssh")
pytestmark = [pytest.mark.needs("sshd"), pytest.mark.quick]
NODE = Host(name="mine-worker1")
# As SkyPilot writes it.
ENTRY = """
Host mine-worker1
  HostName 127.0.0.1
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile={file}
  GlobalKnownHostsFile=/dev/null
  Port {port}
"""


def configured(home: Home, server: Sshd, file: str = "/dev/null") -> Access:
    """Return the way to a server whose keys the configuration keeps in `file`."""
    home.config.write_text(ENTRY.format(key=home.key, port=server.port, file=file))
    return home.access


def test_the_first_key_is_trusted_and_no_other_one(
    home, session_server, user_key, tmp_path
):
    pins = tmp_path / 'it is 100% "mine"'
    access = configured(home, session_server)
    for _ in range(2):
        ssh.connect(NODE, access, NoAsker(), pins=str(pins)).close()
        line = f"{NODE.name} {session_server.host_keys[0]}"
        assert pins.read_text().splitlines() == [line]
    assert stat.S_IMODE(pins.stat().st_mode) == 0o600
    assert not home.known_hosts.exists()
    for kind in ("ed25519", "ecdsa"):
        folder = tmp_path / kind
        with sshd(folder, Path(f"{user_key}.pub"), kinds=(kind,)) as other:
            configured(home, other)
            with pytest.raises(HostKeyError) as caught:
                ssh.connect(NODE, access, NoAsker(), pins=str(pins))
        assert str(pins) in caught.value.message
        assert caught.value.hint.splitlines()[1] == f"  rm '{pins}'"
        assert "Accepted" not in "".join(other.log)
    assert pins.read_text().splitlines() == [line]


def test_two_first_connections_at_once_keep_one_key(home, session_server, tmp_path):
    access, pins = configured(home, session_server), tmp_path / "pins"
    with ThreadPoolExecutor(4) as pool:
        made = [
            pool.submit(ssh.connect, NODE, access, NoAsker(), pins=str(pins))
            for _ in range(4)
        ]
        for one in made:
            one.result().close()
    assert len(pins.read_text().splitlines()) == 1


def test_a_file_that_cant_be_written_trusts_no_key(home, session_server, tmp_path):
    pins = tmp_path / "no folder" / "pins"
    access = configured(home, session_server)
    before = session_server.connections()
    with pytest.raises(HostKeyError) as caught:
        ssh.connect(NODE, access, NoAsker(), pins=str(pins))
    why = f"can't be kept: {pins}: No such file or directory."
    assert caught.value.message.endswith(why)
    assert session_server.connections() == before


@pytest.mark.parametrize("file", [os.devnull, "none"])
def test_a_host_whose_keys_are_kept_nowhere(home, session_server, file, golden):
    access = configured(home, session_server, file)
    with pytest.raises(HostKeyError) as caught:
        ssh.connect(NODE, access, NoAsker())
    hint = caught.value.hint
    golden(hint)
    assert "--on sky:NAME" in hint
    assert "keyscan" not in hint
    assert f"={os.devnull}" not in hint


def test_the_first_of_several_files_that_keeps_a_key_gets_it(home, session_server):
    kept = f"{home.folder}/kept"
    access = configured(home, session_server, f"/dev/null {kept}")
    with pytest.raises(HostKeyError) as caught:
        ssh.connect(NODE, access, NoAsker())
    port = session_server.port
    assert f"ssh-keyscan -p {port} 127.0.0.1 >> {kept}\n" in caught.value.hint
