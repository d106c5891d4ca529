"""The five ways in which the magics use the rest of distmagic, as functions that tests replace.

Each function imports its module when it is called: `%load_ext distmagic` imports neither torch nor paramiko.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.payload.pack import Payload
    from distmagic.playground.playground import Playground
    from distmagic.render.screen import AnnouncingScreen
    from distmagic.session.session import Session


class PackCall(Protocol):
    """The type of `payload.pack.pack_call`."""

    def __call__(
        self,
        thunk: Callable[[], object],
        *,
        limit_bytes: int,
        labels: Mapping[str, str],
        title: str,
    ) -> Payload:
        """Pack a function without arguments. Raises `PayloadError`, or `PayloadTooLarge` above `limit_bytes`."""


class PackWhole(Protocol):
    """The type of `payload.pack.pack_whole`."""

    def __call__(
        self,
        text: str,
        *,
        filename: str,
        labels: Mapping[str, str],
        limit_bytes: int,
        argv: tuple[str, ...],
        title: str,
    ) -> Payload:
        """Pack the text of a cell, with its `sys.argv`. Raises `PayloadError`."""


class ScreenFor(Protocol):
    """The type of `screens.choose.screen_for`."""

    def __call__(
        self, shell: InteractiveShell, *, in_background: bool = ...
    ) -> AnnouncingScreen:
        """Return the screen of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What the magics call: the session with the hosts, the packing of a call, the screen and the playground."""

    session: Callable[[], Session]
    pack_call: PackCall
    pack_whole: PackWhole
    screen_for: ScreenFor
    playground: Callable[[int], Playground]


def _session() -> Session:
    from distmagic.api import session

    return session()


def _pack_call(
    thunk: Callable[[], object],
    *,
    limit_bytes: int,
    labels: Mapping[str, str],
    title: str,
) -> Payload:
    from distmagic.payload.pack import pack_call

    return pack_call(thunk, limit_bytes=limit_bytes, labels=labels, title=title)


def _pack_whole(
    text: str,
    *,
    filename: str,
    labels: Mapping[str, str],
    limit_bytes: int,
    argv: tuple[str, ...],
    title: str,
) -> Payload:
    from distmagic.payload.pack import pack_whole

    return pack_whole(
        text,
        filename=filename,
        labels=labels,
        limit_bytes=limit_bytes,
        argv=argv,
        title=title,
    )


def _screen_for(
    shell: InteractiveShell, *, in_background: bool = False
) -> AnnouncingScreen:
    from distmagic.screens.choose import screen_for

    return screen_for(shell, in_background=in_background)


def _playground(count: int) -> Playground:
    from distmagic.playground.playground import start

    return start(count)


BACKEND = Backend(
    session=_session,
    pack_call=_pack_call,
    pack_whole=_pack_whole,
    screen_for=_screen_for,
    playground=_playground,
)
