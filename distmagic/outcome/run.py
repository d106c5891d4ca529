"""A finished run: return values, logs, files, metrics, the last state."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distmagic import sanitize
from distmagic.comparison.metrics import Metrics, Plot, metrics_of, plot_of
from distmagic.connection.link import Link
from distmagic.connection.requests import job_requests
from distmagic.connection.requests.log_order import by_time_of
from distmagic.connection.requests.remote_files import RemoteFolder
from distmagic.errors import DistmagicError, NoResult, RunError, UsageError
from distmagic.outcome.results import Files, Results, unseen_rank
from distmagic.outcome.shown import cell_number, display_page, leave_out
from distmagic.remote.frozen import frozen
from distmagic.remote.records import journal
from distmagic.remote.wire.protocol import Folder, FoundFile
from distmagic.request.spec import check_tracker
from distmagic.state.explanation import listed
from distmagic.state.model import RunState
from distmagic.tracking.points import Unsent
from distmagic.tracking.writers import TensorBoard

_STREAMS = ("stdout", "stderr")


@frozen
class LogParts:
    """The positions in a rank's logs of stdout and stderr between which a cell's output is.

    `ends` () means the end.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]


class Returned:
    """The return values of a run's ranks as a sequence, in rank order, without ranks that returned
    none: `run[0]`, `run[-1]`.
    """

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
        return True  # even if no rank has returned a value


class Run(Returned):
    """A finished run.

    `run[rank]` is the return value of a rank, and `run[-1]` that of the last one. As a sequence it
    holds the return values of all ranks that have one, in rank order; `results` maps ranks to
    values. `logs(rank)` is the output of a rank, `metrics` has all reported values, `plot("loss")`
    draws one, and `state` is the state at the end. As a cell's value it shows the table and the
    curves again.
    """

    def __init__(
        self,
        state: RunState,
        small_results: Mapping[int, bytes],
        open_link: Callable[[int], Link],
        *,
        shown: bool,
        logged: Mapping[int, LogParts] | None = None,
    ) -> None:
        self.state = state
        self._logged = logged or {}
        self._files = Files(state.job, open_link)
        self._open_link = open_link
        self._shown_in = cell_number() if shown else None
        # Of --fetch and --results: what was not copied.
        self.unfetched: tuple[str, ...] = ()
        # No attribute may refer to the run itself: a reference cycle would outlive `del run` until
        # the next garbage collection.
        self._results = Results(state, small_results, self._files.fetch)

    @property
    def results(self) -> Results:
        """The return values of the ranks, by rank."""
        return self._results

    @property
    def job(self) -> str:
        """The job's name, which is part of its directories on the hosts."""
        return self.state.job

    @property
    def metrics(self) -> Metrics:
        """All reported values: one row for each report, with rank, at_s (seconds since the rank's
        start), step and the values.

        Rows are in the order of time. After a restart at_s starts at 0 again, and the rows follow
        those before it.

        A rank sends at most 20 rows in 0.1 s; with more than 200 ranks the interval is longer. The
        rank's host keeps every row. `run.metrics.frame()` returns a pandas DataFrame. A metric
        named rank or at_s gets an underscore at its end.
        """
        return metrics_of(self.state)

    def plot(self, *names: str) -> Plot:
        """Return the curves of these metrics, or of all, as a figure that a cell can show.

        Raises `UsageError` for a metric that no rank has reported at least twice.
        """
        return plot_of(self.state, names)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> Path:
        """Write the metrics as event files of TensorBoard, one folder `rank0`, `rank1`... for each
        rank; return `folder`.

        The call's arguments are in its HPARAMS. Raises `UsageError` if tensorboard is not installed
        on the notebook machine.
        """
        check_tracker("run.to_tensorboard", "tensorboard")
        path = Path(folder)
        tensorboard = TensorBoard(self.state, path)
        tensorboard.write(Unsent().take(self.state))
        tensorboard.close(has_failed=False)
        return path

    def logs(
        self, rank: int, stream: str | None = None, *, by_time: bool = False
    ) -> str:
        """Return the whole output of a rank, fetched from its host.

        Rank -1 is torchrun: one node after another. On ranks that stay, it is that of this cell.

        `stream` is "stdout" or "stderr". None returns stdout, then stderr; with `by_time` their
        lines are in the order in which the host read them, accurate to about 0.1 s. Control
        characters are removed, except line breaks, carriage returns, tabs and colours.

        In an elastic job a rank may have run on several nodes: this returns the output of its last
        node. torchrun's output comes from all nodes that were not lost. `%distributed logs` also
        prints output from a rank's earlier nodes. Raises `UsageError` for a rank that is unknown or
        has not started.
        """
        streams = [stream] if stream else list(_STREAMS)
        lost = self.state.lost if self.state.is_elastic else {}
        there = [node for node in range(len(self.state.nodes)) if node not in lost]
        nodes = there if rank == -1 else [self._node_of(rank)]
        part = self._logged.get(rank, LogParts(begins=(), ends=()))
        begins = dict(zip(_STREAMS, part.begins, strict=False))
        ends = dict(zip(_STREAMS, part.ends, strict=False))
        texts = []
        for node_rank in nodes:
            data = {}
            for one in streams:
                begin, end = begins.get(one, 0), ends.get(one)
                name = journal.log_name(rank, one)
                data[one] = self._read(node_rank, name, begin, end)
            parts = list(data.values())
            if by_time:
                events = self._read(node_rank, journal.CHATTER_FILE)
                parts = [by_time_of(data, begins, events, rank, ends)]
            texts += [part.decode(errors="replace") for part in parts]
        return sanitize.log("".join(texts))

    def _read(
        self, node_rank: int, name: str, begin: int = 0, end: int | None = None
    ) -> bytes:
        data = io.BytesIO()
        limit_bytes = job_requests.LOG_LIMIT_BYTES
        self._files.fetch(node_rank, name, data.write, limit_bytes, begin, end)
        return data.getvalue()

    def files(self, rank: int = 0, pattern: str = "**") -> tuple[FoundFile, ...]:
        """Return the files in the working directory of a rank's host: each with path, size_bytes
        and changed_s.

        In `pattern`, `*` matches within one folder and `**` matches any depth. A path is exactly as
        on the host and may contain line breaks: print its `repr`. Raises `UsageError` for an
        unknown rank, and `PreflightError` for more than 10,000 files.
        """
        return self._work_dir(self._node_of(rank)).find(pattern)

    def fetch(
        self,
        pattern: str,
        to: str | os.PathLike[str] = ".",
        rank: int = 0,
        *,
        ranks: str | None = None,
    ) -> list[Path]:
        """Copy files of a rank's working directory to the folder `to`; return the paths of the
        copies.

        With `ranks="all"` it copies from all hosts, each into a subfolder of `to` with the host's
        name.

        In `run.fetch("checkpoints/*.pt")` each file keeps its path below the working directory. The
        path of a folder means all files in it. An interrupted copy continues at the next call.
        Raises `UsageError` if no file matches. Raises `NoResult` if a file can't be written on this
        machine or keeps changing; with `ranks="all"` the other hosts' files are copied first.
        """
        if ranks is None:
            return self._work_dir(self._node_of(rank)).fetch(pattern, Path(to))
        if ranks != "all":
            raise UsageError(
                f"ranks={ranks!r} is not known.", 'Write ranks="all", or rank=3.'
            )
        return self._fetch_all(pattern, Path(to))

    def _fetch_all(self, pattern: str, to: Path) -> list[Path]:
        folders: dict[str, int] = {}
        for _, worker in sorted(self.state.workers.items()):
            name = worker.host
            if folders.get(name, worker.node_rank) != worker.node_rank:
                name = f"{worker.host}-node{worker.node_rank}"
            folders[name] = worker.node_rank
        paths = []
        errors = []
        for name, node_rank in folders.items():
            try:
                paths += self._work_dir(node_rank).fetch(pattern, to / name)
            except DistmagicError as error:
                errors.append(error)
        if errors and len(folders) == 1:
            raise errors[0]
        # It is no failure if a host's ranks write no such file.
        failed = [error for error in errors if not isinstance(error, UsageError)]
        if failed or not paths:
            words = map(str, failed or errors)
            raise NoResult("\n".join(["Not all hosts gave their files.", *words]))
        return paths

    def _work_dir(self, node_rank: int) -> RemoteFolder:
        folder = Folder(job=self.job, node_rank=node_rank)
        open_link = partial(self._open_link, node_rank)
        return RemoteFolder(folder, open_link, self.state.began_up_s)

    def _node_of(self, rank: int) -> int:
        worker = self.state.workers.get(rank)
        if worker is not None:
            return worker.node_rank
        if _is_to_begin(self.state, rank):
            raise UsageError(
                f"Rank {rank} has not started yet: the run is {self.state.phase}.",
                "Ask again when the view shows that rank.",
            )
        there = listed(sorted(self.state.workers)) or "none has started"
        raise unseen_rank(self.state, rank) or UsageError(
            f"There is no rank {rank} in this run.",
            f"Its ranks: {there}. See print({self.state.variable}).",
        )

    def __repr__(self) -> str:
        from distmagic import render

        return render.text(self.state)

    def _repr_html_(self) -> str:
        from distmagic import render

        return render.html(self.state)

    def _ipython_display_(self) -> None:
        """Show the summary, unless the run was just shown in the same cell."""
        # Only in the cell that ran it: a later cell shows the run again.
        if self._shown_in is not None and self._shown_in == cell_number():
            self._shown_in = None
            leave_out(f"<run {self.job}: {self.state.phase}>")
            return
        page = {"text/plain": repr(self), "text/html": self._repr_html_()}
        display_page(page)


def left(
    state: RunState,
    small_results: Mapping[int, bytes],
    open_link: Callable[[int], Link],
    error: RunError | None,
    logged: Mapping[int, LogParts] | None = None,
) -> Run:
    """Return the `Run` of a finished run.

    Raises the `error` of a failed one; its attribute `run` is the `Run`.
    """
    run = Run(state, small_results, open_link, shown=error is None, logged=logged)
    if error is None:
        return run
    error.run = run
    try:
        raise error
    finally:
        # The error's traceback refers to this frame: a reference cycle would keep both, and the
        # run, alive.
        del error


def _is_to_begin(state: RunState, rank: int) -> bool:
    """Whether a running job may still start this rank.

    Before the plan is made, any number may be a rank.
    """
    if state.is_over or rank < 0:
        return False
    return state.world_size == 0 or rank < state.world_size
