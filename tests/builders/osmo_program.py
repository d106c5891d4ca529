"""A program `osmo` for tests, as the public source of the real one has it: options, output, exit codes.

It runs as a process of its own. What it is to do, and what it knows, lies in files of the folder in OSMO_PLAYED, which
the service of tests/builders/osmo_service.py writes: `how.json` has a word for each command that is not to go well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

STATE = Path(os.environ["OSMO_PLAYED"])
ALIVE = ("PENDING", "RUNNING", "WAITING")


def main() -> int:
    """Run one command and return its exit code."""
    args = parsed()
    how = json.loads((STATE / "how.json").read_text()).get(args.command, "")
    if how == "hang":
        signal.pause()
    if how == "log in":
        return fail(args, 'Must login first with "login" command', 2)
    if how == "away":
        return fail(args, "\nCannot connect to OSMO service, with error:\n...\n", 10)
    return {
        "submit": submit,
        "query": query,
        "logs": logs,
        "cancel": cancel,
        "download": download,
    }[args.command](args, how)


def parsed() -> argparse.Namespace:
    """Return the words of the command line, as the real program takes them."""
    parser = argparse.ArgumentParser(prog="osmo")
    modules = parser.add_subparsers(dest="module", required=True)
    workflow = modules.add_parser("workflow").add_subparsers(
        dest="command", required=True
    )
    formats = argparse.ArgumentParser(add_help=False)
    formats.add_argument(
        "--format-type", "-t", choices=("json", "text"), default="text"
    )
    workflow.add_parser("submit", parents=[formats]).add_argument("workflow_file")
    workflow.add_parser("query", parents=[formats]).add_argument("workflow_id")
    workflow.add_parser("cancel", parents=[formats]).add_argument("workflow_id")
    workflow.add_parser("logs").add_argument("workflow_id")
    data = modules.add_parser("data").add_subparsers(dest="command", required=True)
    download = data.add_parser("download")
    download.add_argument("remote_uri")
    download.add_argument("local_path")
    return parser.parse_args()


def fail(args: argparse.Namespace, message: str, code: int) -> int:
    """Print an error in the form that was asked for."""
    if getattr(args, "format_type", "") == "json":
        print(json.dumps({"message": message, "code": 1}, indent=2))
    else:
        print("Error message:", message)
        print("Error code:", 1)
    return code


def submit(args: argparse.Namespace, how: str) -> int:
    """Hand the workflow to the service."""
    if how == "refuse":
        message = "Workflow submit failed:\nPool default has no platform L4"
        return fail(args, message, 1)
    number = len(list(STATE.glob("*.json")))
    name = f"cell-{number}"
    (STATE / f"{name}.json").write_text(json.dumps({"status": "PENDING", "groups": []}))
    (STATE / f"{name}.log").touch()
    shutil.copyfile(args.workflow_file, STATE / f"{name}.new")
    (STATE / f"{name}.new").replace(STATE / f"{name}.yaml")
    print(
        json.dumps(
            {"name": name, "overview": f"https://osmo.example/workflows/{name}"},
            indent=2,
        )
    )
    return 0


def query(args: argparse.Namespace, how: str) -> int:
    """Print how the workflow stands."""
    print((STATE / f"{args.workflow_id}.json").read_text())
    return 0


def logs(args: argparse.Namespace, how: str) -> int:
    """Print the log from its first line on, until the workflow has ended; `short`: break off after some lines."""
    print(f"Workflow {args.workflow_id} has logs:", flush=True)
    state = STATE / f"{args.workflow_id}.json"
    printed = 0
    with (STATE / f"{args.workflow_id}.log").open() as log:
        while True:
            is_over = json.loads(state.read_text())["status"] not in ALIVE
            while line := log.readline():
                print(line, end="", flush=True)
                printed += 1
                if how == "short" and printed > 12 and not is_over:
                    print("\nLog stream has timed out or failed.")
                    return 0
            if is_over:
                return 0
            time.sleep(0.05)


def cancel(args: argparse.Namespace, how: str) -> int:
    """Ask the service to end it; where that can't be, the real one says so with exit code 0."""
    if how == "refuse":
        print(f"Workflow cancelation failed for workflow {args.workflow_id}: not yours")
        return 0
    (STATE / f"{args.workflow_id}.cancel").touch()
    print(json.dumps({"name": args.workflow_id}, indent=2))
    return 0


def download(args: argparse.Namespace, how: str) -> int:
    """Copy what the first task left."""
    shutil.copytree(STATE / "output", args.local_path, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
