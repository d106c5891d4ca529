"""The return values of the ranks, fetched from their hosts on first access."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distmagic.connection.link import Link
from distmagic.connection.requests import job_requests
from distmagic.connection.requests.progress_line import ProgressLine
from distmagic.connection.requests.remote_files import has_room
from distmagic.errors import ConnectionLost, NoResult, PreflightError
from distmagic.remote.values import parcel
from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import clipped
from distmagic.state.model import RunState

_MAX_SHOWN_BYTES = 500  # size limit of a value in the repr


class Files:
    """The files of a job on its hosts, each fetched over its own link."""

    def __init__(self, job: str, open_link: Callable[[int], Link]) -> None:
        self._job, self._open_link = job, open_link

    def fetch(
        self,
        node_rank: int,
        name: str,
        write: Callable[[bytes], object],
        limit_bytes: int,
        begin: int = 0,
        end: int | None = None,
    ) -> int:
        """Pass a node's file, or the part of a log between two positions, to `write` in pieces;
        return its size.

        A new connection continues after a broken one.
        """
        done = before = 0

        def take(data: bytes) -> None:
            nonlocal done
            write(data)
            done += len(data)

        while True:
            link = self._open_link(node_rank)
            request = protocol.GetFile(
                job=self._job,
                node_rank=node_rank,
                name=name,
                offset=done,
                begin=begin,
                end=end,
            )
            try:
                job_requests.fetch(link, request, take, limit_bytes=limit_bytes - done)
            except ConnectionLost:
                link.close()
                if done == before:
                    raise
                before = done
            except BaseException:
                link.close()
                raise
            else:
                link.finish()
                return done


class Results(Mapping[int, Any]):
    """Return values by rank. Each is unpickled at its first access; large ones are fetched then.

    Unpickling runs code that the hosts chose: access results only from hosts that you trust with
    your notebook. A rank without a result raises `NoResult`, which is also a `KeyError`. `clear()`
    frees the accessed values.
    """

    def __init__(
        self, state: RunState, small: Mapping[int, bytes], fetch: Callable[..., int]
    ) -> None:
        self._state, self._small, self._fetch = state, small, fetch
        self._loaded: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._loaded:
            self._loaded[rank] = self._load(rank)
        return self._loaded[rank]

    @property
    def last_rank(self) -> int:
        """The highest rank of the run, whether it returned or not; -1 if none started."""
        return max(self._state.workers, default=-1)

    def clear(self) -> None:
        """Free the accessed values; the next access unpickles them again."""
        self._loaded.clear()

    def __contains__(self, rank: object) -> bool:
        """Whether a rank left a result. Fetches nothing."""
        return rank in set(self)

    def __iter__(self) -> Iterator[int]:
        return iter(
            sorted(
                r
                for r, w in self._state.workers.items()
                if w.ended
                and w.ended.outcome == "returned"
                and w.ended.result_bytes is not None
            )
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        """Return all results like a dict.

        Large results that were not fetched are shown by their size, long values shortened.
        """
        shown = []
        for rank in self:
            value = f"<{self._size(rank):,} bytes, not looked at yet>"
            if rank in self._loaded or rank in self._small or not self._size(rank):
                try:
                    value = clipped(repr(self[rank]), _MAX_SHOWN_BYTES)
                except Exception as error:  # noqa: BLE001 - the value's own code
                    value = f"<{type(error).__name__}: {error}>"
            shown.append(f"{rank}: {value}")
        return f"{{{', '.join(shown)}}}"

    def _size(self, rank: int) -> int:
        ended = self._state.workers[rank].ended
        return (ended.result_bytes or 0) if ended else 0

    def _no_result(self, rank: int) -> NoResult:
        hint = f"Ranks with a result: {list(self) or 'none'}."
        worker = self._state.workers.get(rank)
        if worker is None:
            return unseen_rank(self._state, rank) or NoResult(
                f"There is no rank {rank} in this run.", hint
            )
        if worker.ended is None and worker.node_rank in self._state.lost:
            return NoResult(
                f"The result of {worker.label} is unknown: {worker.host} was lost before the rank reported it.",
                f"If it returned, %distributed attach {self._state.job} has its result as soon as {worker.host} can be "
                f"reached. {hint}",
            )
        why = (
            f": {worker.ended.meaning}"
            if worker.ended and worker.ended.outcome == "returned"
            else ""
        )
        words = f"{worker.label} left no result{why.removesuffix('.')}."
        return NoResult(words, hint)

    def _load(self, rank: int) -> Any:
        if rank not in self:
            raise self._no_result(rank)
        if not self._size(rank):
            return None
        if rank in self._small:
            return parcel.load_bytes(self._small[rank], f"the result of rank {rank}")
        # If TMPDIR is on NFS, a mapped file leaves a `.nfs...` file, and its folder can't be
        # removed yet.
        with tempfile.TemporaryDirectory(
            prefix="distmagic-result-", ignore_cleanup_errors=True
        ) as folder:
            path = Path(folder) / "result"
            try:
                with path.open("wb") as file:
                    self._download(rank, file)
            except PreflightError as gone:  # the file was removed on its host
                raise NoResult(gone.message, gone.hint) from gone
            except OSError as error:
                raise NoResult(
                    f"The result of rank {rank}, {self._size(rank):,} bytes, can't be written to {folder} on this machine: "
                    f"{error.strerror or error}.",
                    "The result is still on its host. Make room, or set TMPDIR to a directory on another disk, and look again.",
                ) from error
            # Mapped: the file can be deleted, and its bytes remain until they are unused.
            return parcel.load(path)

    def _download(self, rank: int, file: io.BufferedWriter) -> None:
        if not has_room(file, self._size(rank)):
            raise OSError("there is less room")
        line = ProgressLine(f"result of rank {rank}", self._size(rank))

        def write(data: bytes) -> None:
            file.write(data)
            file.flush()  # the host is informed when all is written, and may then remove it
            line.add(len(data))

        self._fetch(
            self._state.workers[rank].node_rank,
            f"rank{rank}.result",
            write,
            self._size(rank),
        )
        line.end()


def unseen_rank(state: RunState, rank: int) -> NoResult | None:
    """Return the error for a rank of an elastic job whose host was lost before the notebook
    received anything of the rank.
    """
    if not state.is_elastic or not 0 <= rank < state.world_size:
        return None
    at_work = state.at_work
    unseen = [state.nodes[node].host for node in state.lost if node not in at_work]
    if not unseen:
        return None
    hosts = " and ".join(dict.fromkeys(unseen))
    return NoResult(
        f"The result of rank {rank} is unknown: {hosts} could not be followed.",
        f"If the rank ran, %distributed attach {state.job} brings its result as soon as its host can be reached.",
    )
