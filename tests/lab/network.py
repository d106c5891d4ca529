"""Cables and firewalls of the lab: the few `ip` and `nft` commands that it takes."""

from __future__ import annotations

import json
import subprocess

from tests.system.components import COMPONENTS


def ip(*commands: str) -> None:
    """Change this network by commands of `ip`. Raises AssertionError with what it said."""
    done = _run_ip(commands)
    assert done.returncode == 0, f"ip: {done.stderr} in {commands}"


def ip_may_fail(command: str) -> None:
    """Run a command of ip(8) whose object may be gone already."""
    _run_ip((command,))


def sent_bytes(device: str) -> int:
    """Return how many bytes a card has sent so far, packets' heads included; /sys may show another network."""
    argv = [COMPONENTS["ip"].path() or "ip", "-json", "-statistics", "link", "show"]
    done = subprocess.run([*argv, device], capture_output=True, check=True)
    (found,) = json.loads(done.stdout)
    return int(found["stats64"]["tx"]["bytes"])


def _run_ip(commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMPONENTS["ip"].path() or "ip", "-batch", "-"],
        input="".join(f"{command}\n" for command in commands),
        text=True,
        capture_output=True,
        check=False,
    )


def add_rules(first: int, *rules: str) -> None:
    """Add rules, each `in ...` or `out ...`, to the firewall of the host whose first process is `first`."""
    chains = "".join(
        f"add chain inet lab {name} {{ type filter hook {hook} priority 0; }};\n"
        for name, hook in (("in", "input"), ("out", "output"))
    )
    _nft(
        first,
        "add table inet lab;\n"
        + chains
        + "".join(f"add rule inet lab {rule};\n" for rule in rules),
    )


def clear_rules(first: int) -> None:
    """Take all rules away."""
    _nft(first, "add table inet lab; delete table inet lab")


def _nft(first: int, commands: str) -> None:
    argv = [
        "nsenter",
        "--target",
        str(first),
        "--net",
        "--",
        COMPONENTS["nft"].path() or "nft",
        "-f",
        "-",
    ]
    subprocess.run(argv, input=commands, text=True, check=True)
