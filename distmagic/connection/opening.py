"""Opens a link: starts Python on the host, sends the bundle if it is missing, and receives the
facts about the host.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from distmagic.connection import limits
from distmagic.connection.link import BOOT_TIMEOUT_S, Link
from distmagic.errors import ConnectionLost, HostError, ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.planning import preflight
from distmagic.remote.contact import boot
from distmagic.remote.wire import protocol
from distmagic.request.access import Access
from distmagic.request.command_prefix import SETUP_LIMIT_S, interpreter_words
from distmagic.request.hosts import Host
from distmagic.transports import Process, Transport
from distmagic.transports.time_limits import TimeLimit

SHELL_S = 5.0  # time to reach Python, after which the log-in shell is checked
_WORD = b"distmagic-word"
_NOISE_BYTES = 1 << 20  # size limit of log-in banners before distmagic's first line


def open_link(
    host: Host,
    transport: Transport,
    python: str,
    bundle: LocalBlob,
    access: Access | None = None,
) -> Link:
    """Start `contact` on the host, wait for the facts about the host, and return the link.

    `access` has the commands of `--setup` and `--exec-prefix`, in which Python is started. Raises
    `HostError`, `ConnectionLost`, `ProtocolError`.
    """
    access = access or Access()
    words = (*access.before_python, *interpreter_words(python))
    process = transport.start((*words, "-u", "-c", boot.BOOTSTRAP))
    link = Link(host, process, transport)
    link.interpreter = python
    link.by_hand = access.by_hand(host)
    link.warnings = tuple(f"{host.name}: {text}" for text in transport.warnings)
    link.is_past_shell = not host.has_log_in_shell or bool(access.setup_line)
    limit_s = BOOT_TIMEOUT_S + (SETUP_LIMIT_S if access.setup_line else 0)
    look = partial(_look_at_shell, link, transport)
    try:
        with TimeLimit(SHELL_S, look), link.bounded(limit_s):
            _boot(link, process, bundle, access)
            link.facts = link.answer(protocol.Facts)
    except BaseException:
        link.close()
        raise
    return link


def _look_at_shell(link: Link, transport: Transport) -> None:
    """Close the link if the log-in shell can't even run `cat`.

    A slow shell, and a slow start of Python, are waited for.
    """
    if link.is_past_shell:
        return
    try:
        process = transport.start(("cat",))
    except (HostError, ConnectionLost):
        return  # the host may allow no second process
    output = b""
    with TimeLimit(BOOT_TIMEOUT_S, process.close):
        with suppress(ConnectionLost):
            process.write(b"\n" * boot.FIRST.count(b"\n") + _WORD + b"\n")
            process.close_stdin()
        while data := process.read():
            output = output[-_NOISE_BYTES:] + data
        code = process.wait(SHELL_S)
    process.close()
    if code is not None and _WORD not in output and not link.is_past_shell:
        link.shell_trouble = "does not run the command, or reads its input"
        link.close()


def _boot(link: Link, process: Process, bundle: LocalBlob, access: Access) -> None:
    try:
        link.write(boot.FIRST + access.setup_line + boot.program(bundle.blob.sha256))
        reply = _boot_reply(link)
    except ConnectionLost:  # it may end before anything is sent
        raise _no_python(link, process, access.exec_prefix) from None
    name = link.host.name
    preflight.check_system(name, reply.system)
    link.python = reply.python
    preflight.check_oldest_python(name, reply.python, str(reply.executable))
    if reply.error:
        raise preflight.not_writable(name, reply.home, reply.error)
    if reply.have:
        link.write(b"0\n")
    else:
        size = f"{bundle.blob.size_bytes}\n"
        link.write(size.encode() + bundle.path.read_bytes())


def _boot_reply(link: Link) -> limits.FirstReply:
    """Return the first line of distmagic; log-in shells may print anything before it."""
    noise = 0
    while noise < _NOISE_BYTES:
        line = link.line()
        noise += len(line) + 1
        if boot.SHELL in line:
            what = "runs another shell instead of the command"
            raise preflight.shell_in_the_way(link.host.name, what, link.by_hand)
        if boot.PYTHON in line:
            link.is_past_shell = True
        start = line.find(boot.MARK)
        if start >= 0:
            return limits.first_reply(line[start + len(boot.MARK) :], link.host.name)
    raise ProtocolError(
        f"{link.host.name}: its log-in shell prints without end.",
        "Look at its start-up files.",
    )


def _no_python(link: Link, process: Process, exec_prefix: str) -> Exception:
    """Return the error for a host on which no Python answered."""
    host = link.host
    if link.shell_trouble:
        return preflight.shell_in_the_way(host.name, link.shell_trouble, link.by_hand)
    if link.is_closed:
        return ConnectionLost(f"{host.name}: the connection was closed.")
    code = process.wait(2.0)
    stderr = " ".join(process.stderr().split())
    has_no_words = code == 0 or (not stderr and code not in (None, 126, 127))
    if has_no_words and not link.is_past_shell:
        what = f"ended (exit code {code}) before it came to Python"
        return preflight.shell_in_the_way(host.name, what, link.by_hand)
    if code == 0 and host.has_log_in_shell:
        what = "leaves no input for Python"
        return preflight.shell_in_the_way(host.name, what, link.by_hand)
    return preflight.no_python(
        host.name, link.interpreter, code, stderr, link.by_hand, exec_prefix
    )
