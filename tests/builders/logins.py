"""A log-in node on which Slurm's commands answer what a test says; nothing is started."""

from __future__ import annotations

from distmagic.errors import ConnectionLost
from tests.builders.keepers import request_of

PENDING = "17|PENDING|Resources||N/A|30:00|2|distmagic:me\n"
RUNNING = "17|RUNNING|None|a[1-2]|N/A|29:00|2|distmagic:me\n"
ENDLESS = PENDING.replace("Resources", "PartitionNodeLimit")
FOREIGN = RUNNING.replace("distmagic:me", "(null)")
COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")
CANCELLED = RUNNING.replace("RUNNING", "CANCELLED")


class Said:
    """A process that has ended, with what it printed; one of a lease ends when it is told to."""

    def __init__(
        self, out: str = "", err: str = "", code: int = 0, *, stays: bool = False
    ) -> None:
        self.pieces = [out.encode()] if out else []
        self.err, self.code, self.stays = err, code, stays
        self.written = b""

    def again(self) -> Said:
        return Said(b"".join(self.pieces).decode(), self.err, self.code)

    def write(self, data: bytes) -> None:
        if not self.stays:
            raise ConnectionLost("it has ended")
        self.written += data
        self.stays = data not in (b"e", b"b")

    def read(self, max_bytes: int = 65536) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    def stderr(self) -> str:
        return self.err

    def wait(self, timeout_s: float | None = None) -> int | None:
        return None if self.stays else self.code

    def close_stdin(self) -> None:
        return

    def close(self) -> None:
        self.stays = False


class Login:
    """A log-in node on which each command answers what the test says, its last answer again and again."""

    warnings = ()

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.answers: dict[str, list[Said]] = {
            "sbatch": [Said("17\n")],
            "scancel": [Said()],
        }
        self.leases: list[Said] = []

    def start(self, argv: tuple[str, ...]) -> Said:
        if argv[0] == "timeout":
            argv = argv[4:]
        argv = argv[4:]  # behind what takes variables away
        self.asked.append(argv)
        program = argv[4] if argv[0] == "sh" else argv[0]
        is_usher = program == "srun" and "distmagic-usher" in argv
        if is_usher and "lease" in request_of(argv):
            lease = Said("ready\n", stays=True)
            self.leases.append(lease)
            queue = self.answers.get("srun", [])
            return queue.pop(0) if queue else lease
        queue = self.answers.get(program, [Said()])
        return (queue.pop(0) if len(queue) > 1 else queue[0]).again()

    def close(self) -> None:
        return

    def programs(self) -> list[str]:
        return [argv[0] for argv in self.asked if argv]


def squeue(login: Login, *texts: str) -> None:
    login.answers["squeue"] = [Said(text) for text in texts]
