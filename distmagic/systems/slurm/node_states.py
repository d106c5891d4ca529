"""Parses what Slurm records about nodes, and finds those that it takes out of use. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distmagic import sanitize
from distmagic.diagnosis.finding import Finding

_SICK = ("DRAIN", "DRNG", "DOWN", "FAIL", "UNKNOWN")  # starts of states
_NO_ANSWER = "*"  # after a state
_NO_REASON = ("", "none", "(null)")


def sinfo(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the command that queries nodes: a row for each node and partition."""
    names = f"--nodes={','.join(nodes)}"
    return ("sinfo", "--noheader", "--Node", names, "--format=%N|%T|%E")


def findings(text: str, nodes: Sequence[str], ask: str) -> tuple[Finding, ...]:
    """Return the nodes that Slurm takes out of use, with the administrator's reason.

    Other lines are ignored. `ask` is the start of a command on the log-in node.
    """
    found = {}
    for line in text.splitlines():
        node, _, rest = sanitize.line(line).partition("|")
        state, _, reason = rest.strip().partition("|")
        is_silent = state.endswith(_NO_ANSWER)
        # The controller is late with a busy node, whose state is followed by a star for a while.
        if node.strip() not in nodes or not state.upper().startswith(_SICK):
            continue
        word = state.rstrip("*~#!%$@^-+").lower()
        evidence = f"Slurm lists this node as {word}"
        if is_silent:
            evidence += ", and its controller gets no answer from it"
        if reason.strip().lower() not in _NO_REASON:
            evidence += f". Its reason: {reason.strip()}"
        cure = f"Ask the cluster's administrators, or leave the node out: --slurm exclude={node}. By hand: {ask}scontrol show node {node}"
        found[node] = Finding("warning", node, "Slurm", f"{evidence}.", cure)
    return tuple(found.values())
