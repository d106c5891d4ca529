"""An SSH server that asks questions, as log-in nodes of clusters do; OpenSSH can't without PAM."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from tests.lab.waiting import HANG_S
from tests.transports.sshd import Sshd, make_key


@dataclass(slots=True, kw_only=True)
class Rules(paramiko.ServerInterface):
    """Who gets in: `steps` are the methods to pass in order, `answers` the right ones to `questions`."""

    steps: list[str]
    questions: list[tuple[str, bool]] = field(
        default_factory=lambda: [("Verification code: ", False)]
    )
    answers: list[str] = field(default_factory=lambda: ["123456"])
    password: str = "open sesame"
    key: str = ""
    instructions: str = ""
    passed: int = 0

    def get_allowed_auths(self, username: str) -> str:
        return self.steps[min(self.passed, len(self.steps) - 1)]

    def _pass(self, method: str, right: bool) -> int:
        if not right or method != self.steps[self.passed]:
            return paramiko.AUTH_FAILED
        self.passed += 1
        return (
            paramiko.AUTH_SUCCESSFUL
            if self.passed == len(self.steps)
            else paramiko.AUTH_PARTIALLY_SUCCESSFUL
        )

    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_FAILED

    def check_auth_password(self, username: str, password: str) -> int:
        return self._pass("password", password == self.password)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return self._pass("publickey", key.get_base64() == self.key)

    def check_auth_interactive(self, username: str, submethods: bytes) -> object:
        if self.steps[self.passed] != "keyboard-interactive":
            return paramiko.AUTH_FAILED
        return paramiko.InteractiveQuery("", self.instructions, *self.questions)

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        return self._pass("keyboard-interactive", responses == self.answers)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        replied = threading.Event()
        transport = channel.get_transport()
        send = transport._send_user_message

        def send_reply(message: paramiko.Message) -> None:
            transport._send_user_message = send
            send(message)
            replied.set()

        transport._send_user_message = (
            send_reply  # what it sends next is the reply to this request
        )
        threading.Thread(target=self._run, args=(channel, command, replied)).start()
        return True

    def _run(
        self, channel: paramiko.Channel, command: bytes, replied: threading.Event
    ) -> None:
        replied.wait(HANG_S)  # data and the end must not overtake the reply
        channel.sendall(b"ran " + command)
        channel.send_exit_status(0)
        channel.close()


@contextlib.contextmanager
def asking_server(folder: Path, rules: Rules) -> Iterator[Sshd]:
    """Serve connections by `rules` until the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    key = make_key(folder / "host_key")
    listener = socket.create_server(("127.0.0.1", 0))
    serving: list[paramiko.Transport] = []
    thread = threading.Thread(
        target=_serve, args=(listener, paramiko.PKey.from_path(key), rules, serving)
    )
    thread.start()
    try:
        public = " ".join(Path(f"{key}.pub").read_text().split()[:2])
        yield Sshd(port=listener.getsockname()[1], host_keys=(public,), pid=0)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(HANG_S)
        for transport in serving:
            transport.close()
            transport.packetizer.complete_handshake()


def _serve(
    listener: socket.socket,
    key: paramiko.PKey,
    rules: Rules,
    serving: list[paramiko.Transport],
) -> None:
    with contextlib.suppress(OSError):
        while True:
            stream, _ = listener.accept()
            transport = paramiko.Transport(stream)
            transport.add_server_key(key)
            serving.append(transport)
            with contextlib.suppress(paramiko.SSHException, EOFError):
                transport.start_server(event=threading.Event(), server=rules)
