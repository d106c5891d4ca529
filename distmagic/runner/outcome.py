"""What is left of a run: return values, logs, metrics, the last state."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distmagic import sanitize
from distmagic.comparison.metrics import Metrics, Plot, metrics_of, plot_of
from distmagic.connection.link import Link
from distmagic.connection.requests import job_requests
from distmagic.connection.requests.log_order import by_time_of
from distmagic.connection.requests.progress_line import ProgressLine
from distmagic.connection.requests.remote_files import RemoteFolder, has_room
from distmagic.errors import ConnectionLost, NoResult, SpecError
from distmagic.remote.records import journal
from distmagic.remote.values import parcel
from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import clipped
from distmagic.remote.wire.protocol import Folder, FoundFile
from distmagic.request.spec import check_tracker
from distmagic.state.model import RunState
from distmagic.tracking.points import Unsent
from distmagic.tracking.writers import TensorBoard

_MAX_SHOWN_BYTES = 500  # of a value among the results


class Returned:
    """A sequence of what the ranks of a run returned, in their order, as far as they did: `run[0]`, `run[-1]`."""

    @property
    def results(self) -> Results:
        """The return values of the ranks, by rank."""
        raise NotImplementedError

    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return list(self)[rank]
        results = self.results
        return results[rank if rank >= 0 else results.last_rank + 1 + rank]

    def __iter__(self) -> Iterator[Any]:
        results = self.results
        return (results[rank] for rank in results)

    def __len__(self) -> int:
        return len(self.results)

    def __bool__(self) -> bool:
        return True  # also where no rank has returned anything


class Run(Returned):
    """A run that is over.

    `run[rank]` is the return value of a rank, and `run[-1]` that of the last one. As a sequence it holds the return values
    of all ranks that have one, in their order; `results` has them by rank. `logs(rank)` is the output of a rank,
    `metrics` all reported values, `plot("loss")` a curve of one, and `state` the state at the end. As a cell's value it
    shows the table and the curves again.
    """

    def __init__(
        self,
        state: RunState,
        small_results: Mapping[int, bytes],
        open_link: Callable[[int], Link],
        *,
        shown: bool,
    ) -> None:
        self.state = state
        self._files = _Files(state.job, open_link)
        self._open_link = open_link
        self._shown_in = cell_number() if shown else None
        self.unfetched: tuple[str, ...] = ()  # what --fetch named and did not bring
        # Nothing in here may refer to the run itself: a circle lives on after `del run` until a garbage collection.
        self._results = Results(state, small_results, self._files.fetch)

    @property
    def results(self) -> Results:
        """The return values of the ranks, by rank."""
        return self._results

    @property
    def job(self) -> str:
        """The job's name, which its directories on the hosts carry."""
        return self.state.job

    @property
    def metrics(self) -> Metrics:
        """All reported values: one row a report, with rank, at_s (seconds since the rank's start), step and the values.

        A rank sends at most 20 rows in a tenth of a second; with more than 200 ranks in a longer time. The rank's host
        keeps every row. `run.metrics.frame()` is a frame of pandas. A metric named rank or at_s gets an underscore at
        its end.
        """
        return metrics_of(self.state)

    def plot(self, *names: str) -> Plot:
        """Return the curves of these metrics, or of all, as a cell's value shows them.

        Raises `SpecError` for a metric that no rank has reported twice.
        """
        return plot_of(self.state, names)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> Path:
        """Write the metrics as event files of TensorBoard, a folder `rank0`, `rank1`... for each rank; return `folder`.

        The call's arguments are in its HPARAMS. Raises `SpecError` where tensorboard is not installed on the notebook machine.
        """
        check_tracker("run.to_tensorboard", "tensorboard")
        path = Path(folder)
        tensorboard = TensorBoard(self.state, path)
        tensorboard.write(Unsent().take(self.state))
        tensorboard.close()
        return path

    def logs(
        self, rank: int, stream: str | None = None, *, by_time: bool = False
    ) -> str:
        """Return the whole output of a rank, fetched from its host; rank -1 is torchrun itself, one node after another.

        `stream` is "stdout" or "stderr"; None gives both, one after the other. With `by_time` their lines are in the order
        in which the host has read them, to about a tenth of a second. In an elastic job the output comes from the rank's
        last node; torchrun's comes from all nodes that were not lost. `%distributed logs` asks all hosts that are up.
        Control characters are removed, except for line breaks, carriage returns, tabs and colours. Raises `SpecError` for
        a rank that is unknown or has not started.
        """
        streams = [stream] if stream else ["stdout", "stderr"]
        lost = self.state.lost_nodes if self.state.is_elastic else set()
        there = [node for node in range(len(self.state.nodes)) if node not in lost]
        nodes = there if rank == -1 else [self._node_of(rank)]
        texts = []
        for node_rank in nodes:
            data = {
                one: self._read(node_rank, journal.log_name(rank, one))
                for one in streams
            }
            parts = list(data.values())
            if by_time:
                events = self._read(node_rank, journal.CHATTER_FILE)
                parts = [by_time_of(data, {}, events, rank)]
            texts += [part.decode(errors="replace") for part in parts]
        return sanitize.log("".join(texts))

    def _read(self, node_rank: int, name: str) -> bytes:
        data = io.BytesIO()
        self._files.fetch(node_rank, name, data.write, job_requests.LOG_LIMIT_BYTES)
        return data.getvalue()

    def files(self, rank: int = 0, pattern: str = "**") -> tuple[FoundFile, ...]:
        """Return the files in the working directory of a rank's host: each with path, size_bytes and changed_s.

        `*` in `pattern` stays in one folder, `**` goes through all. A path is as the host names it, line breaks and all:
        show it by `repr`. Raises `SpecError` for an unknown rank, and `PreflightError` for more than 10,000 files.
        """
        return self._work_dir(rank).find(pattern)

    def fetch(
        self, pattern: str, to: str | os.PathLike[str] = ".", rank: int = 0
    ) -> list[Path]:
        """Copy files of a rank's working directory to the folder `to`; return where they are.

        `run.fetch("checkpoints/*.pt")`: each file keeps its path below the working directory; the path of a folder means
        all files in it. A copy that breaks
        off continues where it stopped, also in the next call. Raises `SpecError` if no file fits, and `NoResult` if one
        can't be written on this machine, or changes all the time.
        """
        return self._work_dir(rank).fetch(pattern, Path(to))

    def _work_dir(self, rank: int) -> RemoteFolder:
        node_rank = self._node_of(rank)
        folder = Folder(job=self.job, node_rank=node_rank)
        open_link = partial(self._open_link, node_rank)
        began = self.state.began_unix_s, self.state.began_up_s
        return RemoteFolder(folder, open_link, began)

    def _node_of(self, rank: int) -> int:
        worker = self.state.workers.get(rank)
        if worker is not None:
            return worker.node_rank
        if _is_to_begin(self.state, rank):
            raise SpecError(
                f"Rank {rank} has not started yet: the run is {self.state.phase}.",
                "Ask again when the view shows that rank.",
            )
        raise _unseen_rank(self.state, rank) or SpecError(
            f"There is no rank {rank} in this run.",
            f"Its ranks: {sorted(self.state.workers)}.",
        )

    def __repr__(self) -> str:
        from distmagic import render

        return render.text(self.state)

    def _repr_html_(self) -> str:
        from distmagic import render

        return render.html(self.state)

    def _ipython_display_(self) -> None:
        """Show the summary, but not a second time right after the run itself has shown it."""
        # Only in the very cell that ran it: where the run has a name, it is shown by that name in a later cell.
        if self._shown_in is not None and self._shown_in == cell_number():
            self._shown_in = None
            _leave_out(f"<run {self.job}: {self.state.phase}>")
            return
        page = {"text/plain": repr(self), "text/html": self._repr_html_()}
        _display(page)


def _display(page: Mapping[str, str]) -> None:
    from IPython.display import display

    display(dict(page), raw=True)


def _leave_out(short: str) -> None:
    """Show nothing of a value that its cell has shown already; in a terminal, which has printed Out[3]:, a few words."""
    from IPython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        print(short)  # noqa: T201


def _is_to_begin(state: RunState, rank: int) -> bool:
    """Whether a run that goes on may still start this rank. Before there is a plan any number may be one of its ranks."""
    if state.is_over or rank < 0:
        return False
    world_size = max(state.world_size, state.planned_world_size)
    return world_size == 0 or rank < world_size


def _unseen_rank(state: RunState, rank: int) -> NoResult | None:
    """Return the error for a rank whose host was lost before it was seen here, while an elastic job went well without it."""
    if not state.is_elastic or not 0 <= rank < state.world_size:
        return None
    at_work = state.at_work
    unseen = [state.nodes[node].host for node, _ in state.lost if node not in at_work]
    if not unseen:
        return None
    hosts = " and ".join(dict.fromkeys(unseen))
    return NoResult(
        f"Nothing is known of rank {rank}: {hosts} could not be followed.",
        f"If it ran there, %distributed attach {state.job} shows it, and has its result, as soon as they can be reached.",
    )


class _Files:
    """Files of a job on its hosts, each fetched over a link of its own."""

    def __init__(self, job: str, open_link: Callable[[int], Link]) -> None:
        self._job, self._open_link = job, open_link

    def fetch(
        self,
        node_rank: int,
        name: str,
        write: Callable[[bytes], object],
        limit_bytes: int,
    ) -> int:
        """Hand a file of a node to `write`, over a new connection where one breaks in the middle; return its size."""
        done = before = 0

        def take(data: bytes) -> None:
            nonlocal done
            write(data)
            done += len(data)

        while True:
            link = self._open_link(node_rank)
            request = protocol.GetFile(
                job=self._job, node_rank=node_rank, name=name, offset=done
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


def cell_number() -> int | None:
    """Return the number of the cell that IPython is executing, None outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if shell is None else shell.execution_count


class Detached:
    """A job that needs no notebook. `attach()` follows it to its end and returns its `Run`; `stop()` ends it."""

    def __init__(
        self,
        job: str,
        hosts: tuple[str, ...],
        *,
        attach: Callable[[], object],
        stop: Callable[[], None],
    ) -> None:
        self.job, self.hosts = job, hosts
        self.attach, self.stop = attach, stop
        self._left_in = cell_number()

    def _ipython_display_(self) -> None:
        """Show the job, but not in the cell that has left it: its view has these words."""
        if self._left_in is not None and self._left_in == cell_number():
            _leave_out(f"<job {self.job}>")
        else:
            _display({"text/plain": repr(self)})

    def __getattr__(self, name: str) -> Any:
        if name in ("results", "logs", "metrics", "state"):
            raise AttributeError(
                f"job {self.job} was let go on alone, so there is no {name!r} here. Its run has that: "
                f"run = job.attach(), or %distributed attach {self.job} run."
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def __repr__(self) -> str:
        text = (
            f"job {self.job} runs on {', '.join(self.hosts)} without this notebook: "
            f"%distributed attach {self.job} follows it, %distributed stop {self.job} ends it"
        )
        # A job that was found on hosts has the names that these told.
        return sanitize.lines(text)


class NotStarted:
    """Stands in the variable of a run that never began, so that nobody takes an older run for it.

    `why` is the cell's error. `before` is the run that the variable had, None where there was none.
    """

    def __init__(self, name: str, why: str, before: object) -> None:
        self.why = sanitize.lines(why)
        self.before: object = (
            before.before if isinstance(before, NotStarted) else before
        )
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name!r}: {self!r}")

    def __repr__(self) -> str:
        older = (
            f" The run before it: {self._name}.before."
            if self.before is not None
            else ""
        )
        return f"no run, because its cell failed before anything was started ({self.why}).{older}"


class Results(Mapping[int, Any]):
    """Return values by rank. One is unpickled when it is looked at for the first time, large ones fetched then.

    Unpickling runs code that the hosts chose: look at results only of hosts that you trust with your notebook.
    A rank without one raises `NoResult`, which is a `KeyError` too. `clear()` lets go of what was looked at.
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
        """The highest rank of the run, whether it returned or not; -1 where none began."""
        return max(self._state.workers, default=-1)

    def clear(self) -> None:
        """Let go of the values that were looked at; the next look at one unpickles it again."""
        self._loaded.clear()

    def __contains__(self, rank: object) -> bool:
        """Whether a rank left a result; none is fetched for that."""
        return rank in set(self)

    def __iter__(self) -> Iterator[int]:
        return iter(
            sorted(
                r
                for r, w in self._state.workers.items()
                if w.ended and w.ended.result_bytes is not None
            )
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        """Return all as a dict shows them; of a large one that has yet to be fetched its size, and no value at length."""
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
        hint = f"Ranks with a result: {list(self)}."
        worker = self._state.workers.get(rank)
        if worker is None:
            return _unseen_rank(self._state, rank) or NoResult(
                f"There is no rank {rank} in this run.", hint
            )
        if worker.ended is None and worker.node_rank in self._state.lost_nodes:
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
        return NoResult(f"{worker.label} left no result{why}.".replace("..", "."), hint)

    def _load(self, rank: int) -> Any:
        if rank not in self:
            raise self._no_result(rank)
        if not self._size(rank):
            return None
        if rank in self._small:
            return parcel.load_bytes(self._small[rank], f"the result of rank {rank}")
        # Where TMPDIR is on NFS, a mapped file leaves a `.nfs...` behind, and its folder can't be removed yet.
        with tempfile.TemporaryDirectory(
            prefix="distmagic-result-", ignore_cleanup_errors=True
        ) as folder:
            path = Path(folder) / "result"
            try:
                with path.open("wb") as file:
                    self._download(rank, file)
            except OSError as error:
                raise NoResult(
                    f"The result of rank {rank}, {self._size(rank):,} bytes, can't be written here, to {folder}: "
                    f"{error.strerror or error}.",
                    "It is still on its host. Make room, or set TMPDIR to a directory on another disk, and look again.",
                ) from error
            # Mapped: the file's name may go, its bytes stay until nobody looks at them.
            return parcel.load(path)

    def _download(self, rank: int, file: io.BufferedWriter) -> None:
        if not has_room(file, self._size(rank)):
            raise OSError("there is less room")
        line = ProgressLine(f"result of rank {rank}", self._size(rank))

        def write(data: bytes) -> None:
            file.write(data)
            line.add(len(data))

        self._fetch(
            self._state.workers[rank].node_rank,
            f"rank{rank}.result",
            write,
            self._size(rank),
        )
        line.end()
