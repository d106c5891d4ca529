"""The line of `%%distributed`: flags, defaults, messages; and the choice of hosts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.errors import SpecError
from distmagic.notebook.commands import NAMES, OfferedNames
from distmagic.notebook.completion import Completer
from distmagic.request import flag_parser, flag_values, flags
from distmagic.request.allocation import SkyRequest, SlurmRequest
from distmagic.request.config import Chosen, Distmagic, choose_hosts, read_hostfile
from distmagic.request.flags import Defaults, Request, parse_line
from distmagic.request.hosts import LOCALHOST, parse_hosts
from distmagic.request.spec import Access, JobSpec

RANKS = "The number of ranks on each host is --nproc-per-node."
SEE = "%distributed --help lists all flags."


def parse(line: str, **defaults: object) -> Request:
    return parse_line(line, Defaults(**defaults))


def refusal(line: str, **defaults: object) -> str:
    with pytest.raises(SpecError) as caught:
        parse(line, **defaults)
    return str(caught.value)


def test_an_empty_line_is_all_defaults():
    assert parse("") == Request()


def test_every_flag_of_torchrun():
    line = (
        "--nproc-per-node 4 --nnodes 1:3 --max-restarts 2 --rdzv-backend c10d --rdzv-endpoint gpu-a:29400 "
        "--rdzv-id job --master-port 29500 --local-addr 10.0.0.1"
    )
    assert parse(line).spec == JobSpec(
        nproc_per_node=4,
        nnodes=(1, 3),
        max_restarts=2,
        rdzv_backend="c10d",
        rdzv_endpoint="gpu-a:29400",
        rdzv_id="job",
        master_port=29500,
        local_addr="10.0.0.1",
    )


def test_torchruns_underscores_are_the_same_flags():
    assert parse("--nproc_per_node=gpu --max_restarts 1 --cwd=/a_b").spec == JobSpec(
        nproc_per_node="gpu", max_restarts=1, cwd="/a_b"
    )


def test_our_own_flags():
    request = parse(
        "--hosts gpu-a:4,me@gpu-b --ssh-config cfg --ssh-command ssh --connect-timeout 5 --lease 2m --warm-idle 5m --cold "
        "--cwd '/my data' --timeout 1.5h --hang-timeout 10m --payload-limit 2G --whole --dry-run -o run"
    )
    assert request == Request(
        spec=JobSpec(cwd="/my data", timeout_s=5400, hang_timeout_s=600),
        access=Access(
            ssh_config="cfg",
            ssh_command="ssh",
            connect_timeout_s=5,
            lease_s=120,
            warm_idle_s=300,
            cold=True,
        ),
        hosts=parse_hosts("gpu-a:4,me@gpu-b"),
        names_ssh_config=True,
        whole=True,
        dry_run=True,
        output="run",
        payload_limit_bytes=2 * 1024**3,
    )


def test_one_number_of_nodes_is_a_range_of_one():
    assert parse("--nnodes 2").spec.nnodes == (2, 2)


def test_pythons_of_all_hosts_and_of_one():
    base = Access(pythons=(("", "/old"), ("gpu-b", "/b")))
    request = parse(
        "--python /venv/bin/python --python gpu-a=/opt/py=3/python", access=base
    )
    assert dict(request.access.pythons) == {
        "": "/venv/bin/python",
        "gpu-b": "/b",
        "gpu-a": "/opt/py=3/python",
    }
    assert request.python_hosts == ("gpu-a",)
    assert dict(parse("--python /opt/py=3/python").access.pythons) == {
        "": "/opt/py=3/python"
    }


def test_variables_with_values_and_from_the_notebook():
    request = parse(
        "--env A=1 --env 'B=x = y' --env TOKEN", environ={"TOKEN": "secret"}
    )
    assert request.spec.env == (("A", "1"), ("B", "x = y"), ("TOKEN", "secret"))
    assert "secret" not in repr(request)


def test_defaults_are_used_where_the_line_says_nothing():
    defaults = {
        "access": Access(lease_s=5, ssh_config="cfg"),
        "nproc_per_node": "auto",
        "payload_limit_bytes": 7,
    }
    request = parse("--lease 9", **defaults)
    assert request.access == Access(lease_s=9, ssh_config="cfg")
    assert (request.spec.nproc_per_node, request.payload_limit_bytes) == ("auto", 7)
    assert parse("--nproc-per-node 2", **defaults).spec.nproc_per_node == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--host a", f"--host is not a flag of %%distributed.\nDid you mean --hosts? {SEE}"),
        ("--nproc_per_nod 2", f"--nproc-per-nod is not a flag of %%distributed.\nDid you mean --nproc-per-node? {SEE}"),
        ("--zzz=1", f"--zzz is not a flag of %%distributed.\n{SEE}"),
        ("-x 2", f"-x is not a flag of %%distributed.\n{SEE}"),
        ("-n 2", f"-n is not a flag of %%distributed.\n{RANKS}"),
        ("--nprocs 2", f"--nprocs is not a flag of %%distributed.\n{RANKS}"),
        ("--gpus=2", "--gpus is for --on sky.\nSlurm and exported files take --gpus-per-node; the number of ranks on each host is --nproc-per-node."),
        ("--num_processes 2", f"--num-processes is not a flag of %%distributed.\n{RANKS}"),
        ("gpu-a:4", "'gpu-a:4' is not a flag.\nHosts are named with --hosts gpu-a:4; %distributed --help lists all flags."),
        ("--hosts node1:2 node2:2", f"'node2:2' is not a flag.\nHosts are named with --hosts node1:2,node2:2; {SEE}"),
        ("--hosts=a, b, c --fresh", f"'b,' is not a flag.\nHosts are named with --hosts a,b,c; {SEE}"),
        ("--hosts a --fresh b", f"'b' is not a flag.\nHosts are named with --hosts a,b; {SEE}"),
        ("--hosts a --hosts b", "--hosts is given twice.\nWrite one list: --hosts A,B."),
        ("--nproc-per-node 2 --nproc_per_node=4", "--nproc-per-node is given twice.\nKeep one of them."),
        ("-o a -o b", "-o is given twice.\nKeep one of them."),
        ("--export torchrun a --export torchrun b", "--export is given twice.\nKeep one of them."),
        ("--env A=1 --env B=1 --env A=2", "--env is given twice for A.\nKeep one of them."),
        ("--python gpu-a=/p --python /q --python gpu-a=/r", "--python is given twice for gpu-a.\nKeep one of them."),
        ("--python /p --python /q", "--python is given twice.\nKeep one of them."),
        ("--hosts", f"--hosts: expected one argument.\n{SEE}"),
        ("--whole=1", f"--whole: ignored explicit argument '1'.\n{SEE}"),
        ("--background --detach", "--background and --detach are both given.\nKeep --background for a run that is this notebook's, --detach for one that needs no notebook."),
        ("--hosts a --hostfile f", "--hosts and --hostfile are both given.\nKeep one of them."),
        ("--cwd 'x", "The line can't be split into words: no closing quotation.\nIt is: --cwd 'x"),
        ("--nproc-per-node 0", "--nproc-per-node: 0 ranks were asked for; a host runs at least 1.\nUse 1 or more."),
        ("--nproc-per-node -2", "--nproc-per-node: -2 ranks were asked for; a host runs at least 1.\nUse 1 or more."),
        ("--nproc-per-node two", "--nproc-per-node: 'two' is not a number of ranks.\nUse a number, or gpu, cpu or auto."),
        ("--nnodes 0", "--nnodes 0:0 is not a range.\nWrite --nnodes MIN:MAX."),
        ("--nnodes 3:1", "--nnodes 3:1 is not a range.\nWrite --nnodes MIN:MAX."),
        ("--nnodes a", "--nnodes: 'a' is not a number of nodes.\nWrite --nnodes 2 or --nnodes 1:4."),
        ("--max-restarts -1", "--max-restarts -1 is negative.\nUse 0 or more."),
        ("--max-restarts 99999999999", "--max-restarts: 999999999... is too large."),
        ("--max-restarts 2000000", "--max-restarts is too large.\nUse at most 1,000,000."),
        ("--max-restarts x", "--max-restarts: 'x' is not a whole number."),
        ("--rdzv-backend etcd", "--rdzv-backend 'etcd' is not known.\nUse static or c10d."),
        ("--master-port 0", "--master-port 0 is not a port.\nUse 1 to 65535."),
        ("--timeout 0", "--timeout: '0' is not a time.\nWrite seconds, or a number with a unit: 90s, 10m, 2h."),
        ("--warm-idle long", "--warm-idle: 'long' is not a time.\nWrite seconds, or a number with a unit: 90s, 10m, 2h."),
        ("--lease 1d", "--lease: '1d' is not a time.\nWrite seconds, or a number with a unit: 90s, 10m, 2h."),
        ("--payload-limit 0", "--payload-limit: '0' is not a size.\nWrite bytes, or a number with a unit: 512K, 256M, 2G."),
        ("--env TOKEN", "--env TOKEN: the notebook has no such variable.\nWrite --env TOKEN=VALUE."),
        ("--env 1A=2", "--env '1A' is not a variable's name.\nWrite --env NAME=VALUE."),
        ("--python gpu-a=", "--python 'gpu-a=' names no interpreter.\nWrite --python PATH or --python HOST=PATH."),
        ("-o 1x", "-o '1x' is not a variable's name.\nWrite -o run."),
        ("-o class", "-o 'class' is not a variable's name.\nWrite -o run."),
    ],
)  # fmt: skip
def test_a_wrong_line_says_what_is_wrong(line, message):
    assert refusal(line) == message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("0.5", 0.5)],
)
def test_durations(text, seconds):
    assert flag_values.parse_duration(text, "x") == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("2k", 2048), ("1.5M", 1572864), ("1GiB", 2**30), ("3 TB", 0)],
)
def test_sizes(text, size):
    if size:
        assert flag_values.parse_size(text, "x") == size
    else:
        with pytest.raises(SpecError):
            flag_values.parse_size(text, "x")


def test_help_names_every_flag():
    text = flag_parser.help_text()
    assert text.startswith("usage: %%distributed ")
    assert all(name in text for name in flag_parser.flag_names())
    assert flags.asks_help("--hosts a -h")
    assert not flags.asks_help("--hosts a")


@given(st.text(alphabet="-=:abhostenvnpc_ '\"0123", max_size=40))
def test_any_line_is_a_request_or_a_spec_error(line):
    with suppress(SpecError):
        assert isinstance(parse(line), Request)


# ---- the choice of hosts


def test_what_is_asked_of_slurm():
    line = (
        "--on slurm:me@login1 --nodes 2 --gpus-per-node 4 --partition gpu --time 2:00:00 --exclusive"
        " --slurm cpus-per-task=16 --slurm=--hint=nomultithread --setup 'module load cuda; set -x' --idle 5m"
    )
    assert parse(line).allocation == SlurmRequest(
        login="me@login1", nodes=2, setup="module load cuda; set -x", idle_s=300.0,
        options=(
            ("gpus-per-node", "4"), ("partition", "gpu"), ("time", "2:00:00"), ("exclusive", ""),
            ("cpus-per-task", "16"), ("hint", "nomultithread"),
        ),
    )  # fmt: skip
    assert parse("").allocation is None


def test_a_job_that_is_there():
    assert parse("--on slurm:login1:17").allocation == SlurmRequest(
        login="login1", job="17"
    )
    around = {"SLURM_JOB_ID": "7"}
    assert parse("--on slurm", environ=around).allocation == SlurmRequest(job="7")
    assert parse("--on slurm --nodes 2", environ=around).allocation == SlurmRequest(
        nodes=2
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nodes 2", "--nodes is for hosts of a scheduler.\nAdd --on slurm, or leave it out."),
        ("--exclusive", "--exclusive is for hosts of a scheduler.\nAdd --on slurm, or leave it out."),
        ("--slurm hint=x", "--hint is for hosts of a scheduler.\nAdd --on slurm, or leave it out."),
        ("--on slurm --hosts a", "--on asks a scheduler for hosts, and --hosts or --hostfile names some.\nKeep one of them."),
        ("--on slurm:17 --nodes 2", "Slurm job 17 has its nodes already.\nLeave out --nodes, --setup and what sbatch would be told."),
        ("--on slurm --nodes 0", "--nodes 0 is no number of nodes.\nUse 1 to 10,000."),
        ("--on slurm --slurm gpus=8", "--gpus counts GPUs of the whole job, and a step on one node can't have any then.\nWrite --gpus-per-node N."),
        ("--on sing", "--on sing: SING Cloud has no public program that a notebook could use.\n--export sing DIR writes the image of such a job; inside one no --on is needed."),
        ("--on pbs", "--on 'pbs' is not known.\nWrite --on slurm, --on slurm:LOGIN with the name of a log-in node, --on sky, --on sky:NAME, --on osmo or --on none."),
        ("--on sky:", "--on sky: names no cluster.\nWrite --on sky:NAME, or --on sky for a new one."),
        ("--on sky --nodes -1", "--nodes -1 is no number of nodes.\nUse 1 to 10,000."),
        ("--on sky --gpus 4", "--gpus '4' is no kind of GPU.\nWrite the kind and number of each node: --gpus L4:4; sky gpus list shows them."),
        ("--on slurm --gpus L4:4", "--gpus is for --on sky.\nSlurm and exported files take --gpus-per-node; the number of ranks on each host is --nproc-per-node."),
        ("--sky x.yaml", "--sky is for --on sky.\nAdd --on sky, or leave it out."),
        ("--on sky --sky /no/x.yaml", "--sky /no/x.yaml: No such file or directory.\nCheck the path."),
        ("--on sky --sky ~no-such-user/x.yaml", "--sky ~no-such-user/x.yaml: No such file or directory.\nCheck the path."),

        ("--on sky:mine --nodes 2", "sky:mine has its hosts already.\nLeave out --nodes, --gpus, --sky and --idle; --on sky launches another cluster."),
        ("--on sky:mine --exclusive", "--exclusive is for Slurm, and --on sky:mine asks SkyPilot.\nWrite what a node has to have into a task of SkyPilot: --sky FILE.yaml."),
        ("--on sky --gpus-per-node 4", "--gpus-per-node is for Slurm, and --on sky asks SkyPilot.\nWrite --gpus KIND:N, such as --gpus L4:4."),
        ("--on sky:-x", "'-x' is no name of a cluster.\nWrite --on sky:NAME, with a name that sky status shows."),
        ("--on sky:mine --hosts a", "--on asks a scheduler for hosts, and --hosts or --hostfile names some.\nKeep one of them."),
    ],
)  # fmt: skip
def test_what_can_not_be_asked_of_slurm(line, message):
    assert refusal(line) == message


def test_precedence_of_hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("from-file slots=2\n")
    config = Distmagic()
    environ = {"DISTMAGIC_HOSTS": "from-env"}
    notebook = Chosen(hosts=parse_hosts("from-notebook"), source="%distributed hosts")

    def name(
        request: Request,
        notebook: Chosen | None = None,
        environ: dict[str, str] | None = None,
    ) -> str:
        return choose_hosts(request, notebook, config, environ or {}).hosts[0].name

    assert choose_hosts(Request(), None, config, {}) == Chosen(
        hosts=(LOCALHOST,), source="no hosts are named: this machine"
    )
    assert name(Request(), environ=environ) == "from-env"
    config.hostfile = str(file)
    assert name(Request(), environ=environ) == "from-file"
    config.hosts = "from-config"
    assert name(Request(), environ=environ) == "from-config"
    assert name(Request(), notebook, environ) == "from-notebook"
    assert name(Request(hostfile=str(file)), notebook, environ) == "from-file"
    assert (
        name(Request(hosts=parse_hosts("from-line")), notebook, environ) == "from-line"
    )


@pytest.mark.parametrize("where", ["DISTMAGIC_HOSTS", "Distmagic.hosts"])
def test_a_malformed_setting_is_named(where):
    config = Distmagic(hosts="a:0" if where == "Distmagic.hosts" else "")
    with pytest.raises(
        SpecError,
        match=f"^{where}: host 'a:0': 0 ranks were asked for; a host runs at least 1.",
    ):
        choose_hosts(Request(), None, config, {"DISTMAGIC_HOSTS": "a:0"})


def test_hostfile_troubles_name_the_file(tmp_path):
    with pytest.raises(
        SpecError,
        match=r"nowhere: the hostfile can't be read: no such file or directory\.",
    ):
        read_hostfile(str(tmp_path / "nowhere"))
    with pytest.raises(
        SpecError,
        match=r"^~no-such-user/nodes: the hostfile can't be read: no such file or directory\.",
    ):
        read_hostfile("~no-such-user/nodes")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(
        SpecError, match=r"bad: the hostfile can't be read: not a text file\."
    ):
        read_hostfile(str(bad))
    bad.write_text("a slots=2\nb slots=0\n")
    with pytest.raises(SpecError, match="bad, line 2: slots of b: 0 ranks"):
        read_hostfile(str(bad))


def test_settings_become_defaults():
    config = Distmagic(
        ssh_config="cfg",
        python="/py",
        pythons={"b": "/b"},
        nproc_per_node="gpu",
        payload_limit="1M",
        lease_s=5,
    )
    assert config.defaults({"A": "1"}) == Defaults(
        access=Access(ssh_config="cfg", pythons=(("", "/py"), ("b", "/b")), lease_s=5),
        nproc_per_node="gpu",
        payload_limit_bytes=2**20,
        environ={"A": "1"},
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lease_s": 0}, "Distmagic.lease_s: 0 is not a lease."),
        ({"connect_timeout_s": -1}, "Distmagic.connect_timeout_s: -1 is not a time."),
        (
            {"nproc_per_node": "0"},
            "Distmagic.nproc_per_node: 0 ranks were asked for; a host runs at least 1.",
        ),
        ({"payload_limit": "big"}, "Distmagic.payload_limit: 'big' is not a size."),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(SpecError) as caught:
        Distmagic(**setting).defaults({})
    assert caught.value.message == message


# ---- completion

COMPLETER = Completer(
    names=OfferedNames(
        hosts=lambda: ["gpu-a", "gpu-b"],
        jobs=lambda: ["0102-030405-ab"],
        ranks=lambda job: [0, 1, -1] if job == "0102-030405-ab" else [],
    )
)


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("%%distributed --hosts ", ["gpu-a", "gpu-b"]),
        ("%%distributed --hosts gpu-a:4,g", ["gpu-a", "gpu-b"]),
        ("%%distributed --whole --hosts=g", ["gpu-a", "gpu-b"]),
        ("%%distributed --nproc_per_node ", ["gpu", "cpu", "auto"]),
        ("%%distributed --rdzv-backend c", ["static", "c10d"]),
    ],
)
def test_values_of_flags_are_completed(text, candidates):
    assert COMPLETER.candidates(text) == candidates


@pytest.mark.parametrize(
    "text",
    [
        "%%distributed ",
        "%%distributed --ho",
        "%%distributed --hosts a ",
    ],
)
def test_flags_are_completed(text):
    assert set(flag_parser.flag_names()) < set(COMPLETER.candidates(text))


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("%distributed ", list(NAMES)),
        ("%distributed pl", list(NAMES)),
        ("%distributed hosts ", ["gpu-a", "gpu-b"]),
        ("%distributed hosts --h", ["--hostfile", "--python", "--ssh-config"]),
        ("%distributed logs ", ["0102-030405-ab"]),
        ("%distributed logs 0102-030405-ab ", ["0", "1", "-1"]),
        ("%distributed logs other ", []),
        ("%distributed logs 0102-030405-ab 0 ", []),
        ("%distributed view ", ["0102-030405-ab"]),
        ("%distributed playground ", ["stop"]),
        ("%distributed down ", ["--cluster"]),
        ("%distributed add ", ["0102-030405-ab"]),
        ("%distributed add ID g", ["gpu-a", "gpu-b"]),
        ("%distributed clean ", ["all", "0102-030405-ab"]),
        ("%distributed clean all ", ["--everybody"]),
        ("%distributed nothing x", []),
    ],
)
def test_subcommands_are_completed(text, candidates):
    assert COMPLETER.candidates(text) == candidates


@pytest.mark.parametrize("text", ["%%distributed", "%time ", "distributed x", ""])
def test_a_line_that_is_not_ours_is_left_alone(text):
    assert COMPLETER.candidates(text) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hosts a:4  # the large one", ["--hosts", "a:4"]),
        ("# nothing", []),
        ("--env COLOUR=#fff", ["--env", "COLOUR=#fff"]),
        ("--env 'A= # b' -o x # c", ["--env", "A= # b", "-o", "x"]),
    ],
)
def test_a_comment_ends_the_line(line, words):
    assert flags.split(line) == words


def test_the_system_that_has_started_this_can_be_ignored():
    launched = parse("--on sky --nodes 4 --gpus L4:4 --idle 1h").allocation
    assert launched == SkyRequest(nodes=4, gpus="L4:4", idle_s=3600.0)
    assert parse("--on sky:my.one").allocation == SkyRequest(name="my.one")
    assert parse("--on sky:mine --setup true").access.setup == "true"
    assert parse("--on none --hosts a --setup true").access.setup == "true"
    assert parse("--on slurm --setup true").access.setup == "", "its job runs it"
    assert parse("--on none").ignores_system
    assert parse("--on none").allocation is None
    assert not parse("--on slurm").ignores_system
    assert not parse("").ignores_system
    assert refusal("--on none --nodes 2") == (
        "--nodes is for hosts of a scheduler.\nAdd --on slurm, or leave it out."
    )


def test_a_task_of_skypilot_only_sets_hosts_up(tmp_path: Path, monkeypatch):
    task = tmp_path / "my task.yaml"
    task.write_text("resources:\n  cloud: aws\nsetup: |\n  run: this\n")
    monkeypatch.chdir(tmp_path)
    found = parse("--on sky --sky 'my task.yaml'").allocation
    assert found == SkyRequest(file=str(task))
    for line in ("run: python a.py", "'run' : |"):
        task.write_text(f"num_nodes: 2\n{line}\n")
        assert refusal("--on sky --sky 'my task.yaml'") == (
            "--sky my task.yaml has a run: block, which SkyPilot would run beside the cell.\n"
            "Take it out; resources, setup and file_mounts are what is used."
        )
