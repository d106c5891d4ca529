"""How many of the system's clients connect at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports import asking, ssh_command
from distmagic.transports.local import connecting_program
from tests.lab.waiting import wait_until


def test_sixteen_programs_connect_at_a_time_and_a_turn_is_waited_for_without_a_limit(
    tmp_path,
):
    """They may share a bastion, which turns away clients when too many are on their way."""
    client = tmp_path / "ssh"
    client.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/connecting.$$\n"
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done\necho distmagic-ready\nexec cat\n"
    )
    client.chmod(0o700)
    access = Access(ssh_command=str(client), connect_timeout_s=60)

    def connect(number: int) -> None:
        ssh_command.connect(
            Host(name=f"gpu-{number}"), access, asking.NoAsker()
        ).close()

    with ThreadPoolExecutor(20) as pool:
        connected = [pool.submit(connect, number) for number in range(20)]
        try:
            wait_until(
                lambda: len(list(tmp_path.glob("connecting.*"))) == 16,
                "sixteen programs that connect",
            )
            assert not connecting_program.acquire(blocking=False)
        finally:
            (tmp_path / "go").touch()
        for one in connected:
            one.result()
    assert len(list(tmp_path.glob("connecting.*"))) == 20
