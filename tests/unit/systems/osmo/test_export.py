"""OSMO's workflows: they keep its rules, carry everything that they need, and nothing in them is read as a template."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys

import pytest
import yaml

from distmagic.errors import UsageError
from distmagic.exports import systems
from distmagic.exports.job import ExportedProgram, File
from distmagic.inside.detect import detect
from distmagic.systems.osmo import export as osmo
from distmagic.systems.osmo import start_ranks
from tests import REPOSITORY
from tests.builders.exports import HOSTILE, PLAIN, job, shown, texts
from tests.builders.osmo_rules import rules_broken
from tests.builders.shell import completed, refusal
from tests.lab.waiting import HANG_S, wait_until

GOLDEN = REPOSITORY / "tests/golden/exports"
FORMS = ("workflow.yaml", "workflow-ranks.yaml")
ENV = (
    *((f"MY_{place}", value) for place, value in enumerate(HOSTILE)),
    ("HF_TOKEN", "{{it's $x}}"),
)
BRACES = ExportedProgram(
    files=(
        File(path="cell.py", data=b"x = '{{x}} {% raw %} {#'\n"),
        File(path="data.bin", data=bytes(range(256))),
    ),
    words=("cell.py", *HOSTILE),
)
JOBS = {
    "one": job("osmo"),
    "hostile": job("osmo", program=BRACES, spec={"env": ENV}, setup="echo ${#a[@]} {{x}}"),
    "large": job(
        "osmo",
        nodes=3,
        name="Mein Lauf",
        options=(("gpus-per-node", "H100:8"), ("cpus-per-task", "16"), ("mem", "64G")),
        results="my-results",
        spec={"env": (("LR", "0.1"), ("HF_TOKEN", "t"))},
    ),
    "url": job("osmo", nodes=2, results="s3://bucket/a-b", spec={"max_restarts": 2}),
}  # fmt: skip


def test_the_files_of_a_job_with_three_tasks():
    assert shown(systems.files(JOBS["large"])) == (GOLDEN / "osmo.txt").read_text()


def test_a_file_whose_name_is_a_template_is_refused(golden):
    files = (File(path="cell.py", data=b""), File(path="{{ x }}/a.py", data=b""))
    one = job("osmo", program=ExportedProgram(files=files, words=("cell.py",)))
    with golden.raises(UsageError):
        systems.files(one)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one", JOBS.values(), ids=list(JOBS))
def test_a_workflow_keeps_osmos_rules(one, form):
    assert rules_broken(texts(systems.files(one))[form]) == []


@pytest.mark.parametrize("form", FORMS)
def test_every_task_carries_the_program_and_its_scripts(form):
    files = {file.path: file.data for file in systems.files(JOBS["hostile"])}
    workflow = yaml.safe_load(files[form])["workflow"]
    (task,) = workflow["groups"][0]["tasks"]
    carried = {
        file["path"].removeprefix("/tmp/distmagic/"): base64.b64decode(file["contents"])
        for file in task["files"]
    }
    assert carried["program/data.bin"] == bytes(range(256))
    for path, data in carried.items():
        assert files[path] == data
    assert task["credentials"] == {"cell-secrets": {"HF_TOKEN": "HF_TOKEN"}}
    assert all(b"it's $x" not in data for data in carried.values()), (
        "a secret travels inline"
    )
    assert files["secrets/HF_TOKEN"] == b"{{it's $x}}"


def test_ranks_are_numbered_from_an_offset():
    workflow = yaml.safe_load(
        texts(systems.files(JOBS["large"]))["workflow-ranks.yaml"]
    )
    tasks = workflow["workflow"]["groups"][0]["tasks"]
    assert [(task["name"], *task["args"][1:]) for task in tasks] == [
        ("master", "--size=8", "--offset=0", "--world_size=24"),
        ("worker-1", "--size=8", "--offset=8", "--world_size=24"),
        ("worker-2", "--size=8", "--offset=16", "--world_size=24"),
    ]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("      lead: true\n", ""),
        ("{{host:master}}", "{{ host:master }}"),
        ("{{host:master}}", "{{host:nobody}}"),
        ("base64: true", "binary: true"),
        ("64Gi", "64"),
    ],
)
def test_the_table_of_rules_sees_what_is_wrong(good, bad):
    workflow = texts(systems.files(JOBS["large"]))["workflow.yaml"]
    assert good in workflow
    assert rules_broken(workflow.replace(good, bad)) != []


def test_a_file_that_is_too_large_to_be_carried(golden):
    program = ExportedProgram(
        files=(*PLAIN.files, File(path="big", data=bytes(1 << 21))), words=("cell.py",)
    )
    with golden.raises(UsageError):
        systems.files(job("osmo", program=program))


def test_results_that_are_neither_a_dataset_nor_a_url(golden):
    with golden.raises(UsageError):
        job("osmo", results="a b")


# ---- the script that starts numbered ranks


def start(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, start_ranks.__file__, *words]
    return completed(command, check=False)


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
PRINT = f"""
import os, sys
words = [*(os.environ[name] for name in {NAMES}), *sys.argv[1:]]
sys.stdout.write(" ".join(words) + "\\n")  # at once: two ranks have one pipe
"""


def test_ranks_have_their_numbers_and_arguments():
    done = start(
        "--size",
        "2",
        "--offset=3",
        "--world_size",
        "5",
        "--",
        "-c",
        PRINT,
        "--lr",
        "0.1",
    )
    assert sorted(done.stdout.splitlines()) == ["3 0 5 2 --lr 0.1", "4 1 5 2 --lr 0.1"]
    assert done.returncode == 0


def test_a_rank_that_fails_ends_the_others():
    code = "import os,sys,time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert (
        start("--size=2", "--offset=0", "--world_size=2", "--", "-c", code).returncode
        == 7
    )


def test_a_rank_that_is_killed_counts_as_in_a_shell():
    code = "import os; os.kill(os.getpid(), 9)"
    assert (
        start("--size=1", "--offset=0", "--world_size=1", "--", "-c", code).returncode
        == 137
    )


def test_sigterm_ends_all_ranks(tmp_path):
    code = (
        f"import os,time; open(f'{tmp_path}/' + str(os.getpid()), 'w'); time.sleep(600)"
    )
    command = [
        sys.executable,
        start_ranks.__file__,
        "--size=2",
        "--offset=0",
        "--world_size=2",
        "--",
        "-c",
        code,
    ]
    process = subprocess.Popen(command)
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, "both ranks")
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 143
    for pid in os.listdir(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_ranks_outside_the_world(golden):
    done = start("--size=8", "--offset=20", "--world_size=24", "--", "x.py")
    assert done.returncode == 2
    golden(done.stderr)


def test_a_program_with_a_launcher_of_its_own_begins_where_it_likes():
    launcher = ("-u", "/tmp/distmagic/program/distmagic.zip", "task", "/tmp")
    program = ExportedProgram(files=(), words=(), launcher=launcher)
    one = job("osmo", nodes=2, program=program)
    assert rules_broken(osmo.workflow(one)) == []
    node = texts(systems.files(one))["node.sh"]
    assert "cp -R" not in node
    assert "exec python3 -u /tmp/distmagic/program/distmagic.zip task /tmp" in node
    assert '--node-rank="$NODE_RANK"' in node


def test_a_pod_with_two_addresses_announces_one():
    node = texts(systems.files(JOBS["url"]))["node.sh"]
    (line,) = [one for one in node.splitlines() if one.startswith("NODE_ADDR=")]
    hostname = "hostname() { echo 10.0.0.7 fd00::7; }"
    script = f'{hostname}\n{line}\necho "$NODE_ADDR"'
    assert completed(["bash", "-c", script]).stdout == "10.0.0.7\n"


@pytest.mark.parametrize("form", ["node.sh", "ranks.sh"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR: is not set: the workflow sets it"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: is not set: the workflow sets it"),
        ({"NODE_RANK": None}, "NODE_RANK: is not set: the workflow sets it"),
        ({"OUTPUT_DIR": None}, "OUTPUT_DIR: is not set: the workflow sets it"),
        ({"NODE_RANK": "2"}, "NODE_RANK is 2, of 2 nodes"),
        ({"NODE_RANK": "x"}, "NODE_RANK is x, of 2 nodes"),
    ],
)
def test_what_a_task_lacks_is_named_at_once(form, change, message):
    script = texts(systems.files(job("osmo", nodes=2)))[form]
    given = {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "NODE_RANK": "0",
        "OUTPUT_DIR": "/",
    }
    assert message in refusal(script, given, change)


def test_a_task_knows_its_place_inside_the_workflow():
    """For a script or notebook of distmagic that every task runs: the variables are those that `detect` reads."""
    text = osmo.workflow(job("osmo", nodes=3))
    tokens = {"{{workflow_id}}": "cell-7", "{{host:master}}": "master.cell-7"}
    for token, value in tokens.items():
        text = text.replace(token, value)
    tasks = yaml.safe_load(text)["workflow"]["groups"][0]["tasks"]
    places = [detect(task["environment"]) for task in tasks]
    assert [place.words for place in places if place] == [
        f"inside OSMO workflow cell-7, node {rank} of 3" for rank in range(3)
    ]
    assert {place.lead for place in places if place} == {"master.cell-7"}
