"""Plays many hosts that only wait: `python -m tests.bench.many_server SOCKET LOG_IN_S ANSWER_S`.

Each connection to the socket is a log-in, answered after LOG_IN_S, or a conversation with `contact` on a host, whose
answers come ANSWER_S after their requests. What is answered is a recording, with the host's own numbers put in. This
is a process of its own, so that its work is not the notebook's. It ends at the end of its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from distmagic.remote.contact import boot
from distmagic.remote.system import facts
from distmagic.remote.wire import protocol

# A connection begins with a line of one of these, and the host's number.
LOG_IN, CONVERSATION = ("log-in", "conversation")
_LINE_BYTES = 1 << 20
_MANY = 4096  # connections at once that are not accepted yet
_FACTS = protocol.Facts(
    executable="/usr/bin/python3", torch=facts.torch_version(), gpus=0, cpus=8, address="", interface="eth0",
    free_port=29000, free_bytes=1 << 40, state_dir="/home/node/.distmagic",
)  # fmt: skip
_BOOTED = {
    "python": list(sys.version_info[:3]), "home": "/home/node/.distmagic", "have": True, "error": "",
    "executable": "/usr/bin/python3", "system": "linux",
}  # fmt: skip


class Hosts:
    """All hosts. A node's one rank begins with its agent, and ends when it is told to stop."""

    def __init__(self, log_in_s: float, answer_s: float) -> None:
        self._log_in_s, self._answer_s = log_in_s, answer_s

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take one connection to its end."""
        kind, number = (await reader.readline()).decode().split()
        if kind == LOG_IN:
            await asyncio.sleep(self._log_in_s)
            writer.write(b"welcome\n")
            await reader.read()  # until the other end hangs up
        else:
            await self._converse(int(number), reader, writer)
        writer.close()

    async def _converse(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while (await reader.readline()).startswith(b"echo "):
            pass  # what comes before the program that boots
        await self._answer(writer, boot.MARK + json.dumps(_BOOTED).encode() + b"\n")
        await reader.readline()  # the size of the bundle: it is there
        await self._answer(writer, protocol.encode(_facts(number)))
        agent = 0  # the number of its last event
        while line := await reader.readline():
            request = protocol.decode(line)[1]
            events = _events(request, number)
            answers = [protocol.encode(first) for first in _before_agent(request)]
            answers += [
                protocol.encode(event, agent + i) for i, event in enumerate(events, 1)
            ]
            agent += len(events)
            answers += [protocol.encode(answer) for answer in _answers(request, number)]
            if answers:
                await self._answer(writer, b"".join(answers))

    async def _answer(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        await asyncio.sleep(self._answer_s)
        writer.write(data)
        await writer.drain()


def _before_agent(request: object) -> Sequence[protocol.Message]:
    """Return what the host answers before its agent says anything."""
    if isinstance(request, protocol.StartNode) and request.work is not None:
        return (protocol.WorkDirReady(path="/home/node/notebook"),)
    return ()


def _events(request: object, number: int) -> Sequence[protocol.Message]:
    """Return what the host's agent says after a request."""
    if isinstance(request, protocol.StartNode):
        node_rank = request.node_rank
        hello = protocol.Hello(
            protocol=protocol.PROTOCOL,
            job=request.job,
            node_rank=node_rank,
            hostname=f"host-{number}",
            pid=9,
        )
        worker = protocol.Worker(
            rank=node_rank,
            local_rank=0,
            world_size=len(request.hosts),
            restart=0,
            pid=100,
        )
        return hello, worker
    if isinstance(request, protocol.StopNode):
        return protocol.EngineEnded(code=-15), protocol.Final(reason=request.reason)
    return ()


def _answers(request: object, number: int) -> Sequence[protocol.Message]:
    """Return what the host answers beside that."""
    if isinstance(request, protocol.GetRoute):
        return (protocol.Route(address=_address(number), interface="eth0"),)
    if isinstance(request, protocol.GetFreePort):
        return (protocol.FreePort(port=_FACTS.free_port),)
    if isinstance(request, (protocol.OfferBlobs, protocol.CheckBlobs)):
        return (protocol.MissingBlobs(),)
    if isinstance(request, protocol.StopNode):
        return (protocol.AgentGone(),)
    return ()


def _facts(number: int) -> protocol.Facts:
    return replace(_FACTS, address=_address(number))


def _address(number: int) -> str:
    return f"10.1.{number // 250}.{number % 250 + 1}"


async def _main(path: str, log_in_s: float, answer_s: float) -> None:
    hosts = Hosts(log_in_s, answer_s)
    server = await asyncio.start_unix_server(
        hosts.serve, path, limit=_LINE_BYTES, backlog=_MANY
    )
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
