"""A job in the queue of a SkyPilot cluster, which stops itself when its queue is empty: this job
keeps it running.

Its last argument is a line of JSON: {"idle_s": 600}. It checks whether a process of this user
belongs to a distmagic job, and ends when there was none for `idle_s` seconds. Then the cluster may
stop without loss.
"""

import json
import sys
import time

from distmagic.remote.keeper.processes import is_of_job, parents

LOOK_S = 5.0


def main(text: str) -> None:
    """Keep the cluster running until there was no job for a while."""
    idle_s = json.loads(text)["idle_s"]
    used_at = time.monotonic()
    while time.monotonic() < used_at + idle_s:
        if any(is_of_job(pid) for pid in parents()):
            used_at = time.monotonic()
        time.sleep(min(LOOK_S, idle_s / 4))  # several checks before the time is over


if __name__ == "__main__":
    main(sys.argv[2])
