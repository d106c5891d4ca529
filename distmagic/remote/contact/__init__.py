"""Answers the notebook on a host, over one SSH channel, and keeps torch loaded between runs.

A contact keeps no state: it ends with its channel, and the agents run on under their lease. It
starts agents and never runs a rank. A template is a separate process that has torch loaded; agents
are forked from it.

Read in this order:
    Conversation      below: the interface of the channel to the notebook, which these modules use
    boot              the first program on a host: unpacks the bundle
    contact           answers one request after the other
    agents            starts agents, and follows those that run
    relay             forwards bytes between notebook and agent while a job is followed
    blob_receiver     receives files from the notebook or from another host
    file_exchange     sends and receives files of the user; sends logs, results and blobs
    environment_sync  virtual environments, made by uv
    blob_server       sends files to the next host, over TLS
    mutual_tls        TLS between two ends that have the same certificate
    sweep             ends processes that killed agents have left
    template_client   finds, starts and ends templates
    template          a process that has torch loaded and forks agents; its states and promises
    task              for hosts to which no notebook can open a channel: sends a contact its
                      requests, and writes the answers to a log
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distmagic.remote.wire import protocol
    from distmagic.remote.wire.lines import Lines


class Conversation(Protocol):
    """A conversation with the notebook, by descriptor 0 and `out`.

    `owner` names the notebook whose templates it renews; "" means none. `lines` has what the
    notebook has sent after its last request.
    """

    owner: str
    out: int
    lines: Lines

    def say(self, message: protocol.Message) -> None:
        """Send a message."""

    def write(self, data: bytes) -> None:
        """Send bytes that a message has announced."""

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes from the notebook, in pieces."""

    def wait(self, pipe: IO[bytes] | None, timeout_s: float) -> None:
        """Wait until `pipe` can be read; None only waits.

        Raises TimeoutError after `timeout_s`, and SystemExit if the channel ends.
        """

    def renew_templates(self) -> None:
        """Renew the lease of the templates of `owner`."""
