"""The line of `%%distributed`: flags, defaults, messages; and the choice of hosts."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.errors import UsageError
from distmagic.notebook.commands import NAMES
from distmagic.notebook.completion import Completer
from distmagic.request import flag_parser, flag_table, flag_values, flags
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest, SlurmRequest
from distmagic.request.config import Chosen, Distmagic, choose_hosts, read_hostfile
from distmagic.request.flag_values import HEADINGS
from distmagic.request.flags import Defaults, Request, parse_line
from distmagic.request.hosts import LOCALHOST, parse_hosts
from distmagic.request.spec import JobSpec
from tests import REPOSITORY


def parse(line: str, **defaults: object) -> Request:
    return parse_line(line, Defaults(**defaults))


def refusal(line: str, **defaults: object) -> str:
    with pytest.raises(UsageError) as caught:
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
    "line",
    [
        "--host a",
        "--nproc_per_nod 2",
        "--zzz=1",
        "-x 2",
        "-n 2",
        "--nprocs 2",
        "--gpus=2",
        "--num_processes 2",
        "gpu-a:4",
        "--hosts node1:2 node2:2",
        "--hosts=a, b, c --fresh",
        "--hosts a --fresh b",
        "--hosts a --hosts b",
        "--nproc-per-node 2 --nproc_per_node=4",
        "-o a -o b",
        "--export torchrun a --export torchrun b",
        "--env A=1 --env B=1 --env A=2",
        "--python gpu-a=/p --python /q --python gpu-a=/r",
        "--python /p --python /q",
        "--hosts",
        "--whole=1",
        "--background --detach",
        "--hosts a --hostfile f",
        "--cwd 'x",
        "--nproc-per-node 0",
        "--nproc-per-node -2",
        "--nproc-per-node two",
        "--nnodes 0",
        "--nnodes 3:1",
        "--nnodes a",
        "--max-restarts -1",
        "--max-restarts 99999999999",
        "--max-restarts 2000000",
        "--max-restarts x",
        "--rdzv-backend etcd",
        "--master-port 0",
        "--timeout 0",
        "--warm-idle long",
        "--lease 1d",
        "--payload-limit 0",
        "--env TOKEN",
        "--env 1A=2",
        "--python gpu-a=",
        "-o 1x",
        "-o class",
    ],
)  # fmt: skip
def test_a_wrong_line_says_what_is_wrong(line, golden):
    golden(refusal(line))


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
        with pytest.raises(UsageError):
            flag_values.parse_size(text, "x")


def test_a_time_that_may_be_none_is_0():
    request = flags.parse_line("--grace 0 --warm-idle 0", flags.Defaults())
    assert (request.spec.grace_s, request.access.warm_idle_s) == (0.0, 0.0)


def test_help_names_every_flag():
    text = flag_parser.help_text()
    assert text.startswith("usage: %%distributed ")
    assert all(name in text for name in flag_parser.flag_names())
    assert flags.asks_help("--hosts a -h")
    assert not flags.asks_help("--hosts a")


def test_help_has_the_headings_of_the_page_of_flags():
    page = (REPOSITORY / "distmagic" / "help" / "flags.md").read_text()
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    for heading, below in zip(parts[1::2], parts[2::2], strict=True):
        rows = "\n".join(line.split(" | ")[0] for line in below.splitlines() if line.startswith("| `-"))  # fmt: skip
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", rows))
        ours = {f.name for f in flag_table.FLAGS if HEADINGS[f.heading] == heading}
        assert named == ours - {"output"}, heading
    assert list(HEADINGS.values()) == parts[1::2][: len(HEADINGS)]


def test_help_of_a_program_has_no_flags_that_are_refused_there():
    text = flag_parser.help_of_program("distmagic run SCRIPT", is_in_notebook=False)
    assert text.startswith("usage: distmagic run SCRIPT\n\nRun a script ")
    assert not re.search(r"--(whole|script|output|background)\b", text)
    in_notebook = flag_parser.help_of_program("%distributed run", is_in_notebook=True)
    assert in_notebook.startswith("usage: %distributed run\n")
    assert "--background" in in_notebook


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--np", "--nproc-per-node"), ("--workers", "--nproc-per-node"),
        ("--ntasks-per-node", "--nproc-per-node"), ("--num_gpus", "--nproc-per-node"), ("-n", "--nproc-per-node"),
        ("-N", "--nodes"), ("--num-machines", "--hosts"), ("--gres", "--gpus-per-node"), ("--cuda", "--devices"),
        ("--master_addr", "--hosts"), ("--log-dir", "%distributed logs"), ("--standalone", "--hosts localhost"),
        ("--gpu", "--devices"), ("--cpus", "--cpus-per-task"), ("--exclude", "--slurm"), ("--port", "user@name:port"),
        ("--main_process_port", "--master-port"), ("--key", "ssh/config"), ("--no-python", "run -m"), ("--async", "--background"),
        ("--hots", "--hosts"), ("--time-out", "--timeout"),
    ],
)  # fmt: skip
def test_a_flag_of_another_launcher_leads_to_ours(word, meant):
    with pytest.raises(UsageError, match=f"^{word.replace('_', '-')} ") as caught:
        parse(f"{word}=2" if word.startswith("--") else f"{word} 2")
    assert meant in caught.value.hint
    assert "Did you mean" not in caught.value.hint or word in ("--hots", "--time-out")


def test_numbers_of_gpus_lead_to_devices():
    with pytest.raises(UsageError) as caught:
        parse("--gpus 0,1")
    assert "--devices 0,1" in caught.value.hint


@pytest.mark.parametrize("word", ["--quiet", "--keep", "--epochs", "--lr", "--verbose"])
def test_a_flag_that_is_like_none_of_ours_suggests_none(word, golden):
    with pytest.raises(UsageError) as caught:
        parse(word)
    assert "Did you mean" not in caught.value.hint
    golden(caught.value)


@given(st.text(alphabet="-=:abhostenvnpc_ '\"0123", max_size=40))
def test_any_line_is_a_request_or_a_usage_error(line):
    with suppress(UsageError):
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
    "line",
    [
        "--nodes 2",
        "--exclusive",
        "--slurm hint=x",
        "--on slurm --hosts a",
        "--on slurm:17 --nodes 2",
        "--on slurm --nodes 0",
        "--on slurm --slurm gpus=8",
        "--on sing",
        "--on pbs",
        "--on sky:",
        "--on sky --nodes -1",
        "--on sky --gpus 4",
        "--on slurm --gpus L4:4",
        "--sky x.yaml",
        "--on sky --sky /no/x.yaml",
        "--on sky --sky ~no-such-user/x.yaml",

        "--on sky:mine --nodes 2",
        "--on sky:mine --exclusive",
        "--on sky --gpus-per-node 4",
        "--on sky:-x",
        "--on sky:mine --hosts a",
    ],
)  # fmt: skip
def test_what_can_not_be_asked_of_slurm(line, golden):
    golden(refusal(line))


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

    assert choose_hosts(Request(), None, config, {}).hosts == (LOCALHOST,)
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
def test_a_malformed_setting_is_named(where, golden):
    config = Distmagic(hosts="a:0" if where == "Distmagic.hosts" else "")
    with golden.raises(UsageError):
        choose_hosts(Request(), None, config, {"DISTMAGIC_HOSTS": "a:0"})


def test_hostfile_troubles_name_the_file(tmp_path, golden):
    with golden.raises(UsageError):
        read_hostfile(str(tmp_path / "nowhere"))
    with golden.raises(UsageError):
        read_hostfile("~no-such-user/nodes")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xff\xfe")
    with golden.raises(UsageError):
        read_hostfile(str(bad))
    bad.write_text("a slots=2\nb slots=0\n")
    with golden.raises(UsageError):
        read_hostfile(str(bad))


def test_settings_become_defaults():
    config = Distmagic(
        ssh_config="cfg",
        python="/py",
        pythons={"b": "/b"},
        nproc_per_node="gpu",
        payload_limit="1M",
        lease_s=5,
        preload=["lightning"],
    )
    assert config.defaults({"A": "1"}) == Defaults(
        access=Access(
            ssh_config="cfg",
            pythons=(("", "/py"), ("b", "/b")),
            lease_s=5,
            preload=("lightning",),
        ),
        nproc_per_node="gpu",
        payload_limit_bytes=2**20,
        environ={"A": "1"},
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"lease_s": 0},
        {"connect_timeout_s": -1},
        {"nproc_per_node": "0"},
        {"payload_limit": "big"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(setting, golden):
    with golden.raises(UsageError):
        Distmagic(**setting).defaults({})


# ---- completion

COMPLETER = Completer(hosts=lambda: ["gpu-a", "gpu-b"], jobs=lambda: ["0102-030405-ab"])


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("%%distributed --hosts ", ["gpu-a", "gpu-b"]),
        ("%%distributed --hosts gpu-a:4,g", ["gpu-a", "gpu-b"]),
        ("%%distributed --whole --hosts=g", ["gpu-a", "gpu-b"]),
        ("%%distributed --nproc_per_node ", ["gpu", "cpu", "auto"]),
        ("%%distributed --rdzv-backend c", ["static", "c10d"]),
        ("%%distributed --on-disconnect ", ["stop", "keep"]),
    ],
)
def test_values_of_flags_are_completed(text, candidates):
    assert COMPLETER.candidates(text) == candidates


@pytest.mark.parametrize(
    "text", ["%%distributed ", "%%distributed --ho", "%%distributed --hosts a "]
)
def test_flags_are_completed(text):
    assert set(flag_parser.flag_names()) < set(COMPLETER.candidates(text))


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("%distributed ", list(NAMES)),
        ("%distributed pl", list(NAMES)),
        ("%distributed hosts ", ["gpu-a", "gpu-b"]),
        (
            "%distributed hosts --h",
            ["--hosts", "--hostfile", "--python", "--ssh-config"],
        ),
        ("%distributed logs ", ["0102-030405-ab"]),
        ("%distributed logs 0102-030405-ab 0 ", ["--hosts", "--by-time"]),
        ("%distributed view ", ["0102-030405-ab"]),
        (
            "%distributed playground ",
            ["freeze", "thaw", "cut", "heal", "off", "on", "stop", "--keep"],
        ),
        ("%distributed stop 0102-030405-ab ", []),
        ("%distributed jobs ", []),
        ("%distributed down ", ["--cluster"]),
        ("%distributed add ", ["0102-030405-ab"]),
        ("%distributed add ID g", ["gpu-a", "gpu-b"]),
        ("%distributed clean ", ["all", "0102-030405-ab"]),
        ("%distributed clean all ", ["--hosts", "--everybody"]),
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


def test_the_system_that_has_started_this_can_be_ignored(golden):
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
    golden(refusal("--on none --nodes 2"))


def test_a_task_of_skypilot_only_sets_hosts_up(tmp_path, monkeypatch, golden):
    task = tmp_path / "my task.yaml"
    task.write_text("resources:\n  cloud: aws\nsetup: |\n  run: this\n")
    monkeypatch.chdir(tmp_path)
    found = parse("--on sky --sky 'my task.yaml'").allocation
    assert found == SkyRequest(file=str(task))
    for line in ("run: python a.py", "'run' : |"):
        task.write_text(f"num_nodes: 2\n{line}\n")
        golden(refusal("--on sky --sky 'my task.yaml'"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["--stay", "last"]),
        ("0,4-7", ["--stay", "last", "--ranks", "0,4-7"]),
        ("exp 2 -o run", ["--stay", "exp", "--ranks", "2", "-o", "run"]),
        ("exp --hosts a:2", ["--stay", "exp", "--hosts", "a:2"]),
    ],
)
def test_a_line_of_ranks_is_one_of_distributed(line, words):
    assert flags.words_of_ranks(line, "last") == words


def test_ranks_that_stay_and_those_of_them_on_which_a_cell_runs():
    request = flags.parse_line("--stay exp --ranks 7,0,4-5", flags.Defaults())
    assert (request.stay, request.ranks) == ("exp", (0, 4, 5, 7))
    request = flags.parse_line("--stay exp --stay-idle 30m", flags.Defaults())
    assert request.stay_idle_s == 1800.0
    request = flags.parse_line(
        "--stay exp --stay-idle 30m --on-disconnect keep", flags.Defaults()
    )
    assert request.spec.on_disconnect == "keep"
    # The idle time of the hosts counts for ranks that would keep them in use, if the user has named it.
    on_slurm = "--stay exp --on slurm --nodes 2"
    for line, limit_s in (
        (on_slurm, None),
        (f"{on_slurm} --idle 20m", 1200.0),
        (f"{on_slurm} --idle 20m --stay-idle 5m", 300.0),
    ):
        assert flags.parse_line(line, flags.Defaults()).stay_idle_s == limit_s
    usual = flags.parse_line("--on slurm --nodes 2 --idle 20m", flags.Defaults())
    assert usual.stay_idle_s is None


@pytest.mark.parametrize(
    "line",
    [
        "--ranks 0",
        "--stay-idle 30m",
        "--stay exp --stay-idle 0",
        "--stay exp --ranks 3-1",
        "--stay exp --ranks x",
        "--stay exp --detach",
        "--stay exp --background",
        "--stay exp --script -- 5",
        "--stay exp --max-restarts 1",
        "--stay exp --nnodes 1:2",
        "--stay exp --on-disconnect keep",
        "--stay 1a",
    ],
)
def test_what_ranks_that_stay_cannot_have_is_refused(line, golden):
    golden(refusal(line))
