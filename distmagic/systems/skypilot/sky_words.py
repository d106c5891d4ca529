"""Parses output of SkyPilot's program about clusters, and its ssh configuration. Pure.

A cluster NAME has the SSH hosts NAME, NAME-worker1, NAME-worker2 and so on, head first. The program
writes their ssh configuration to a file for each cluster, at every launch and status query.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from distmagic import sanitize
from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.allocation import SkyRequest

# The arguments that ask for all clusters of the user, as SkyPilot has seen them last.
STATUS = ("status", "--output", "json")
SSH_FOLDER = "~/.sky/generated/ssh"
GET_IT = (
    "Install it where the notebook runs: pip install 'skypilot[aws]', or another cloud instead of aws; then sky check. "
    "https://docs.skypilot.co has more."
)


@frozen
class ClusterState:
    """The state of a cluster in SkyPilot."""

    name: str
    status: str  # UP, INIT, STOPPED or similar
    launch: str  # identifies the launch
    stops: bool = False  # SkyPilot stops it when its job queue was empty for some time


def states(out: str) -> tuple[ClusterState, ...]:
    """Return the clusters in output of `status`. Raises `ValueError` if it contains no list."""
    # The output may start with a spinner, even into a pipe, and the list follows the sequence that
    # erases it.
    text = sanitize.ESCAPE.sub("", out).replace("\r", "\n")
    start = re.search(r"^\[(?=\s*[{\]])", text, re.MULTILINE)
    if start is None:
        raise ValueError("there is no list of clusters in it")
    records, _ = json.JSONDecoder().raw_decode(text, start.start())
    found = []
    for record in records:
        # A cluster keeps its hash until it is shut down; starting a stopped one counts as a new
        # launch.
        launch = f"{record.get('cluster_hash', '')}-{record.get('launched_at', '')}"
        found.append(
            ClusterState(
                name=str(record["name"]),
                status=str(record["status"]),
                launch=launch,
                stops=record.get("autostop", -1) >= 0,  # minutes
            )
        )
    return tuple(found)


def name_for(owner: str, request: SkyRequest) -> str:
    """Return the name of a notebook's cluster: equal requests give the same name.

    `owner` is the notebook's owner name: ann@laptop:/home/ann/train.ipynb.
    """
    asked = f"{owner} {request.nodes} {request.gpus} {request.file}"
    number = hashlib.sha256(asked.encode()).hexdigest()[:6]
    person = owner.partition("@")[0]
    stem = owner.rpartition("/")[2].rpartition(":")[2].partition(".")[0]
    words = [re.sub(r"[^a-z0-9]", "", word.lower())[:10] for word in (person, stem)]
    return "-".join(["dm", *(word for word in words if word), number])


def hosts_in(text: str, cluster: str) -> tuple[str, ...]:
    """Return the hosts of a cluster in SkyPilot's ssh configuration, head first."""
    name = re.escape(cluster)
    found = re.findall(rf"(?m)^Host ({name}(?:-worker(\d+))?)\s*$", text)
    found.sort(key=lambda host: int(host[1] or 0))
    return tuple(host for host, _ in found)


def plain(line: str) -> str:
    """Return a line of the program's output without terminal control sequences.

    Text before a carriage return is left out.
    """
    last = sanitize.ESCAPE.sub("", line).rstrip("\r\n").rpartition("\r")[2]
    return sanitize.line(last).strip()


def not_up(name: str, known: Sequence[ClusterState]) -> UsageError:
    """Return the error for an unusable cluster; `known` are all existing ones."""
    state = next((one for one in known if one.name == name), None)
    if state is None:
        there = sorted(f"{one.name} ({one.status})" for one in known)
        names = ", ".join(there) or "none"
        return UsageError(
            f"SkyPilot has no cluster {name}.",
            f"SkyPilot has these clusters: {names}. sky launch -c {name} makes this one.",
        )
    return UsageError(
        f"The cluster {name} is not up: SkyPilot reports {state.status}.",
        f"Start it again: sky start {name}; see why: sky status {name} --refresh",
    )
