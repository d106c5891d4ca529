"""Answers the notebook on a host, over one SSH channel, and keeps torch loaded between runs.

A contact holds nothing: when its channel ends it ends, and agents go on under their lease. It starts agents and never
runs a rank. The template is a process of its own, from which agents are forked.

Read in this order:
    Conversation      below: what all of these use of the channel to the notebook
    boot              the first program on a host: unpacks the bundle
    contact           one request after the other
    agents            starts agents, and follows those that run
    relay             bytes between notebook and agent, while a job is followed
    blob_receiver     files that come in, from the notebook or from another host
    file_exchange     files of the user, to the notebook and from it; logs, results and blobs to it
    environment_sync  virtual environments, made by uv
    blob_server       files that are handed on to the next host, over TLS
    mutual_tls        TLS between two ends that hold the same certificate
    sweep             ends what agents left that were killed
    template_client   finds, starts and ends templates
    template          a process that has torch loaded and forks agents; its states and promises
    task              where no notebook can open a channel: talks to a contact in its place, and writes to a log
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distmagic.remote.wire import protocol


class Conversation(Protocol):
    """The conversation with the notebook. `owner` is the one whose templates it renews, "" for none."""

    owner: str

    def say(self, message: protocol.Message) -> None:
        """Send a message."""

    def write(self, data: bytes) -> None:
        """Send bytes that a message has announced."""

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes that come from the notebook."""

    def take_rest(self) -> bytes:
        """Return the bytes that the notebook has sent after the last request."""

    def wait(self, pipe: IO[bytes] | None, timeout_s: float) -> None:
        """Wait until a pipe can be read, if there is one. Raises TimeoutError, and SystemExit with the channel."""

    def renew_templates(self) -> None:
        """Renew the lease of the templates of `owner`."""
