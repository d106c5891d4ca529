"""Merges stdout and stderr of a rank into one text, in the order in which its host read them.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.remote.wire import protocol


def by_time_of(
    streams: Mapping[str, bytes],
    skipped: Mapping[str, int],
    events: bytes,
    rank: int,
    stops: Mapping[str, int] | None = None,
) -> bytes:
    """Return the lines of a rank's streams in the order of the output events in a node's journal.

    Each stream is the end of a log, after `skipped` bytes, or more if the host has removed some.
    With `stops` it ends at these positions. Lines without an event, because the journal is too
    short or behind, come last.
    """
    chunks = []  # (stream, position of its end in the whole log)
    for line in events.split(b"\n")[:-1]:
        if line.startswith(b'{"t":"output"'):
            _, event = protocol.decode(line)
            assert isinstance(event, protocol.Output)
            end = event.offset + event.size_bytes
            if (
                event.rank != rank
                or event.stream not in streams
                or not event.size_bytes
            ):
                continue
            if not stops or end <= stops.get(event.stream, end):
                chunks.append((event.stream, end))
    ends = dict(chunks)  # the last position of each stream
    begins = {}
    for name, data in streams.items():
        begins[name] = max(skipped.get(name, 0), ends.get(name, 0) - len(data))
    done = dict.fromkeys(streams, 0)
    parts = []
    for name, end in chunks:
        at, data = done[name], streams[name]
        until = data.rfind(b"\n", at, max(at, end - begins[name])) + 1
        if until > at:
            parts.append(data[at:until])
            done[name] = until
    rest = [data[done[name] :] for name, data in streams.items()]
    return b"".join(parts + rest)
