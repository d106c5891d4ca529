"""A job in the queue of a cluster of SkyPilot, which stops itself when that queue is empty: runs while it is not to stop.

Its last argument is a line of JSON: {"idle_s": 600}. It looks whether a process of this user belongs to a job of
distmagic, and ends when there was none for `idle_s` seconds. Where the cluster stops then, nothing is lost.
"""

import json
import os
import sys
import time

LOOK_S = 5.0
_JOB = b"\0DISTMAGIC_JOB="  # as keeper.py has it, which travels apart from this file


def has_job() -> bool:
    """Whether a job of distmagic runs here, its own process not counted."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = b"\0" + file.read()
        except OSError:
            continue  # it has ended, or is another user's
        _, found, value = variables.partition(_JOB)
        if found and not value.startswith((b"-", b"\0")):
            return True
    return False


def main(text: str) -> None:
    """Hold the cluster until no job was there for a while."""
    idle_s = json.loads(text)["idle_s"]
    used_at = time.monotonic()
    while time.monotonic() < used_at + idle_s:
        if has_job():
            used_at = time.monotonic()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[2])
