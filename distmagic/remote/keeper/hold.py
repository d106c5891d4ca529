"""A job in the queue of a cluster of SkyPilot, which stops itself when that queue is empty: runs while it is not to stop.

Its last argument is a line of JSON: {"idle_s": 600}. It looks whether a process of this user belongs to a job of
distmagic, and ends when there was none for `idle_s` seconds. Where the cluster stops then, nothing is lost.
"""

import json
import sys
import time

from distmagic.remote.keeper.processes import is_of_job, parents

LOOK_S = 5.0


def main(text: str) -> None:
    """Hold the cluster until no job was there for a while."""
    idle_s = json.loads(text)["idle_s"]
    used_at = time.monotonic()
    while time.monotonic() < used_at + idle_s:
        if any(is_of_job(pid) for pid in parents()):
            used_at = time.monotonic()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[2])
