"""What OSMO takes as a workflow: its own rules, as its public models have them, in a table of ours.

`rules_broken` reads a workflow as OSMO does: as a template of Jinja first, then as YAML. The models are those of
src/utils/job/workflow.py and task.py of its repository, read in 2026.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import yaml

_NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9_-]*[a-zA-Z0-9])?\Z")
_SIZE = re.compile(r"\d+(Ki|Mi|Gi|Ti)\Z")
_TOKEN = re.compile(r"\{\{(workflow_id|output|input:\d+|host:[A-Za-z0-9_-]+)\}\}")
# Every key that a level may have, with the type of its value; those in _NEEDED it must have.
_KEYS: dict[str, dict[str, type]] = {
    "document": {"version": int, "workflow": dict},
    "workflow": {"name": str, "resources": dict, "groups": list, "tasks": list, "timeout": dict, "pool": str},
    "resource": {"cpu": int, "gpu": int, "memory": str, "storage": str, "platform": str},
    "group": {"name": str, "barrier": bool, "ignoreNonleadStatus": bool, "tasks": list},
    "task": {
        "name": str, "image": str, "command": list, "args": list, "lead": bool, "environment": dict, "credentials": dict,
        "files": list, "inputs": list, "outputs": list, "resource": str,
    },
    "file": {"path": str, "contents": str, "base64": bool},
}  # fmt: skip
_NEEDED = {
    "document": {"workflow"},
    "workflow": {"name"},
    "group": {"name", "tasks"},
    "task": {"name", "image", "command"},
    "file": {"path", "contents"},
}


def rules_broken(text: str) -> list[str]:
    """Return a sentence for each rule that a workflow breaks."""
    found = []
    plain = _TOKEN.sub("", text)
    found += [
        f"Jinja would read {mark}" for mark in ("{{", "}}", "{%", "{#") if mark in plain
    ]
    document = yaml.safe_load(text)
    found += _level("document", document)
    if document.get("version", 2) != 2:
        found.append("the version is 2")
    workflow = document["workflow"]
    found += _level("workflow", workflow)
    for resource in workflow.get("resources", {}).values():
        found += _level("resource", resource)
        for size in ("memory", "storage"):
            if size in resource and not _SIZE.match(str(resource[size])):
                found.append(f"{size} {resource[size]} has no unit")
    names = [workflow["name"]]
    for group in workflow["groups"]:
        found += _level("group", group)
        found += _group(group)
        names += [group["name"], *(task["name"] for task in group["tasks"])]
    found += [f"{name} is no name" for name in names if not _NAME.match(name)]
    return found


def _group(group: dict[str, Any]) -> list[str]:
    found = []
    tasks = group["tasks"]
    if len(tasks) > 1 and sum(task.get("lead", False) for task in tasks) != 1:
        found.append("a group has one lead")
    same = {task["name"].lower().replace("_", "-") for task in tasks}
    if len(same) != len(tasks):
        found.append("two tasks have one name")
    hosts = {f"host:{task['name']}" for task in tasks}
    for task in tasks:
        found += _level("task", task)
        found += _task(task, hosts)
    return found


def _task(task: dict[str, Any], hosts: set[str]) -> list[str]:
    found = []
    words = [*task["command"], *task.get("args", [])]
    if not task["command"] or not all(isinstance(word, str) for word in words):
        found.append("a command is a list of texts")
    for value in task.get("environment", {}).values():
        for token in _TOKEN.findall(value):
            if token.startswith("host:") and token not in hosts:
                found.append(f"{token} is no task of the group")
    for output in task.get("outputs", ()):
        is_dataset = list(output) == ["dataset"] and list(output["dataset"]) == ["name"]
        if list(output) != ["url"] and not is_dataset:
            found.append(f"{output} is no output")
    return found + _files(task.get("files", []))


def _files(files: list[dict[str, Any]]) -> list[str]:
    found = []
    if len({file["path"] for file in files}) != len(files):
        found.append("two files have one path")
    for file in files:
        found += _level("file", file)
        if [part for part in file["path"].split("/") if part][:1] in ([], ["osmo"]):
            found.append(f"{file['path']} is OSMO's")
        if file.get("base64"):
            base64.b64decode(file["contents"], validate=True)
    return found


def _level(name: str, given: dict[str, Any]) -> list[str]:
    known = _KEYS[name]
    found = [f"a {name} has no {key}" for key in given if key not in known]
    found += [f"a {name} needs {key}" for key in _NEEDED.get(name, set()) - set(given)]
    for key, value in given.items():
        if key in known and type(value) is not known[key]:
            found.append(f"{key} of a {name} is {value!r}")
    return found
