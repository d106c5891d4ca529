"""Runs the same cell or script on every node of a job: node 0 runs it on all nodes, and the others
serve node 0.

inside/ has the messages and the authentication between nodes.
"""

# # ruff: noqa: T201  # messages about a node belong to the output of its cell

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distmagic import errors, sanitize
from distmagic.connection.link import Link
from distmagic.errors import (
    Cancelled,
    DistmagicError,
    RunError,
    UsageError,
    WorkerFailed,
)
from distmagic.inside.addresses import address_of_lead
from distmagic.inside.detect import detect
from distmagic.inside.following import Following
from distmagic.inside.job_node import Environ, JobNode
from distmagic.inside.meeting import Meeting, as_words
from distmagic.inside.proof import SharedSecret, missing, proof_of
from distmagic.outcome.run import Run
from distmagic.payload.sizes import plural
from distmagic.remote.contact import template_client
from distmagic.remote.wire import protocol
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host, Hosts, Source
from distmagic.request.spec import JobSpec
from distmagic.session.background import BackgroundRun, Left
from distmagic.state.model import NodeState, RunState, WorkerState
from distmagic.transports import Transport
from distmagic.transports.channel import ChannelMessage

PATIENCE = 20  # times --connect-timeout, for nodes to arrive: 5 minutes by default

Outcome = Left | BackgroundRun | None
Launch = Callable[[Hosts, Access], Outcome]


def digest_of(*texts: str) -> str:
    """Return a digest of the code that a node runs, to detect nodes that run different code."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogateescape")
        digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()


@dataclass
class Inside:
    """The job whose nodes all run the code of this process, if there is one.

    All cells share this process's part in it.

    `kernel` is the name under which hosts keep warm processes for node 0. `own_link` opens a link
    to this machine, for the results of its own ranks. `current` is that part, None outside a job.
    """

    kernel: str
    own_link: Callable[[Access], Link]
    current: Part | None = None

    def part(self, environ: Environ) -> Part | None:
        """Return this process's part in such a job; None if it is in none. Raises `UsageError`."""
        place = detect(environ)
        if place is None:
            return None
        if self.current is None or self.current.place != place:
            proof = proof_of(environ, place)
            self.current = Part(place, proof, self)
        return self.current

    def close(self) -> None:
        """Disconnect from the job's other nodes."""
        part, self.current = self.current, None
        if part is not None:
            part.close()


class Part:
    """The part of this process in a job whose nodes all run the same code."""

    def __init__(
        self, place: JobNode, proof: SharedSecret | None, inside: Inside
    ) -> None:
        self.place = place
        self.source = Source(
            name=f"inside:{place.key}",
            by_hand="on {node}:",
            ended=f"This notebook has left {place.system}.",
            cure="Run the cell again on all nodes.",
        )
        others = [Host(name=name, allocation=self.source) for name in place.names[1:]]
        self.hosts = (LOCALHOST, *others)
        self._proof, self._inside = proof, inside
        self._cell = 0
        self._meeting: Meeting | None = None
        self._following: Following | None = None
        self._led_by = ""  # the kernel of node 0

    def run(
        self,
        digest: str,
        access: Access,
        spec: JobSpec,
        launch: Launch,
        before: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Run a cell or script in this node's role, and return its outcome.

        Node 0 calls `launch` with the hosts of the job. The others call `before`, serve node 0, and
        return the outcome that node 0 sends, with the results of their own ranks. Raises the errors
        of `launch` on all nodes, `Unreachable`, and `UsageError`, for example if the nodes can't
        authenticate.
        """
        place, task = self.place, self.place.task
        if task is not None:
            raise UsageError(
                f"{place.words}: this process is task {task.rank} of {task.world_size}, "
                f"one of several ({task.said_by}). Only a script runs like this: distmagic run SCRIPT.",
                "Start one task a node, such as srun --ntasks-per-node=1; or write --on none.",
            )
        if spec.detach:
            raise self.refusal("--detach")
        self._cell += 1
        if self._proof is None:
            raise UsageError(
                f"{place.words}: {missing(place)}, so the nodes can't recognize each other. Each would train a "
                "model of its own.",
                "Set DISTMAGIC_SECRET to one random text of 16 characters or more on all nodes; where each node is to run "
                "by itself, write --on none.",
            )
        if place.node_rank:
            return self._follow(self._proof, digest, access, before)
        self._say(f"leads {plural(place.nnodes - 1, 'other node')}.")
        return self._lead(self._proof, digest, access, launch)

    def refusal(self, flag: str) -> UsageError:
        """Return the error for a flag by which a cell would end before its run."""
        return UsageError(
            f"{self.place.words}: {flag} does not work in a job that starts this program on every node: the job ends with the program.",
            "Leave the flag out.",
        )

    def transport(self, host: Host) -> Transport:
        """Return a transport to one of the other nodes. Raises `Unreachable`."""
        assert self._meeting is not None
        return self._meeting.transport(host.name)

    def close(self) -> None:
        """Disconnect from the job's other nodes."""
        if self._meeting is not None:
            self._meeting.close()
        if self._following is not None:
            self._following.close()
            if self._led_by:
                template_client.end_all(self._led_by)
        self._meeting = self._following = None

    def _say(self, text: str) -> None:
        print(f"{self.place.words}: {text}", flush=True)

    # ---- node 0

    def _lead(
        self, proof: SharedSecret, digest: str, access: Access, launch: Launch
    ) -> Outcome:
        if self._meeting is None:
            self._meeting = Meeting(self.place, proof)
        meeting = self._meeting
        run: Any = None
        error: BaseException | None = None
        try:
            meeting.gather(self._cell, digest, _patience_s(access), self._say)
            run = launch(self.hosts, self._with_pythons(access, meeting))
        except KeyboardInterrupt as interrupt:
            error = interrupt
            if isinstance(interrupt, Cancelled):
                raise
            error = Cancelled("Interrupted while the nodes were waited for.")
            raise error from None
        except BaseException as problem:
            error = problem
            raise
        finally:
            meeting.end_cell(
                self._cell, lambda node_rank: self._told(run, error, node_rank)
            )
        return run  # type: ignore[no-any-return]

    def _told(
        self, run: Outcome, error: BaseException | None, node_rank: int
    ) -> ChannelMessage:
        """Return the message to a node about the run's end."""
        told: ChannelMessage = {"kernel": self._inside.kernel}
        if error is not None:
            told["error"] = as_words(error)
            run = getattr(error, "run", None)
        if isinstance(run, Run):
            told["job"] = run.job
            told["world_size"] = run.state.world_size
            told["ranks"] = [
                {
                    "rank": worker.rank,
                    "local_rank": worker.local_rank,
                    "phase": worker.phase,
                    "outcome": worker.ended.outcome if worker.ended else "",
                    "result_bytes": worker.ended.result_bytes if worker.ended else None,
                }
                for worker in run.state.workers.values()
                if worker.node_rank == node_rank
            ]
        return told

    @staticmethod
    def _with_pythons(access: Access, meeting: Meeting) -> Access:
        """Return `access` with each node's own interpreter, unless the user names one."""
        known = dict(access.pythons)
        if "" not in known:
            for member in meeting.members:
                known.setdefault(member.name, member.python)
        return replace(access, pythons=tuple(known.items()))

    # ---- the others

    def _follow(
        self,
        proof: SharedSecret,
        digest: str,
        access: Access,
        before: Callable[[], object],
    ) -> Outcome:
        lead = self.place.names[0]
        self._say(f"follows node 0, {lead}, which shows all ranks.")
        if self._following is None:
            self._following = Following(self.place, proof, address_of_lead(self.place))
        following = self._following
        try:
            following.come(self._cell, digest, _patience_s(access))
            before()
            told = following.outcome()
        except KeyboardInterrupt as interrupt:
            self.close()
            if isinstance(interrupt, Cancelled):
                raise
            raise Cancelled(
                f"Interrupted: this node, {self.place.node_rank}, has left the run."
            ) from None
        except BaseException:
            self.close()  # node 0 must not wait for this node
            raise
        self._led_by = str(told.get("kernel", ""))
        run = self._own_ranks(told, access) if told.get("job") else None
        if told.get("error"):
            error = _as_error(told["error"], lead)
            if isinstance(error, RunError):
                error.run = run
            raise error
        self._say(f"node 0, {lead}, reports that all went well.")
        return run

    def _own_ranks(self, told: Mapping[str, Any], access: Access) -> Run:
        """Return the run as this node has it: with the results and logs of its own ranks."""
        place = self.place
        workers = {}
        for one in told["ranks"]:
            ended = protocol.Ended(
                rank=one["rank"],
                restart=0,
                outcome=one["outcome"],
                result_bytes=one["result_bytes"],
            )
            workers[one["rank"]] = WorkerState(
                rank=one["rank"],
                local_rank=one["local_rank"],
                node_rank=place.node_rank,
                host=place.names[place.node_rank],
                phase=one["phase"],
                ended=ended if one["outcome"] else None,
            )
        nodes = tuple(
            NodeState(node_rank=number, host=name, phase="ended")
            for number, name in enumerate(place.names)
        )
        state = RunState(
            job=told["job"],
            nodes=nodes,
            workers=workers,
            world_size=told["world_size"],
        )
        return Run(state, {}, lambda _: self._inside.own_link(access), shown=True)


def _patience_s(access: Access) -> float:
    return PATIENCE * access.connect_timeout_s


def _as_error(words: Mapping[str, Any], lead: str) -> DistmagicError:
    """Return the error with which node 0 has ended."""
    kind = getattr(errors, str(words["kind"]), None)
    message, hint = str(words["message"]), str(words["hint"])
    if not isinstance(kind, type) or not issubclass(kind, DistmagicError):
        what = sanitize.lines(f"{words['kind']}: {message}")
        return DistmagicError(f"{lead}: node 0 failed before the run: {what}", hint)
    if kind is not UsageError and not issubclass(kind, RunError):
        return DistmagicError(message, hint)  # its class takes other arguments
    error: DistmagicError = kind(message, hint)
    if isinstance(error, RunError):
        error.stacks = str(words["stacks"])
    if isinstance(error, WorkerFailed):
        error.remote_traceback = str(words["remote_traceback"])
    return error
