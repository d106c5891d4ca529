"""The table of all flags: the parser, the help text and the Tab key follow it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distmagic.request.allocation import IDLE_S
from distmagic.request.export import SYSTEMS
from distmagic.request.flag_values import (
    device_list,
    idle_time,
    nnodes,
    number_of,
    parse_size,
    python,
    sbatch_option,
    time_of,
    variable_name,
)
from distmagic.request.hosts import parse_hosts, parse_slots
from distmagic.request.spec import (
    CONNECT_TIMEOUT_S,
    LEASE_S,
    PAYLOAD_LIMIT_BYTES,
)

# The help's headings, which are those of help/flags.md, and the flags below each.
HEADINGS = {
    "torchrun's flags, under torchrun's names": "nproc-per-node nnodes max-restarts rdzv-backend rdzv-endpoint rdzv-id master-port local-addr",
    "Hosts": "hosts hostfile python setup exec-prefix ssh-config ssh-command connect-timeout",
    "Nodes of a scheduler": "on gpus sky nodes gpus-per-node partition account qos reservation time constraint cpus-per-task mem "
    "exclusive slurm idle",
    "Files in place of a run": "export image results",
    "The ranks": "env sync name fetch fresh devices no-wait no-settings cwd whole script payload-limit output dry-run",
    "How long": "timeout hang-timeout grace node-lost-after lease on-disconnect background detach warm-idle cold",
}
NO_SYSTEM = "none"  # after --on
OSMO = "osmo"
SBATCH_FLAGS = (
    "gpus-per-node",
    "partition",
    "time",
    "account",
    "qos",
    "constraint",
    "cpus-per-task",
    "mem",
    "exclusive",
    "reservation",
)
# What only a run has that a notebook follows, or that reaches hosts. The first one that a line has is named.
NOT_WITH_EXPORT = (
    "on", "dry-run", "detach", "timeout", "hang-timeout", "grace", "lease", "on-disconnect", "node-lost-after", "warm-idle",
    "cold", "idle", "fresh", "output", "local-addr", "ssh-config", "ssh-command", "connect-timeout", "fetch", "devices",
    "no-wait", "exec-prefix", "background", "no-settings",
)  # fmt: skip
# What means nothing with --on osmo; systems/osmo/run.py has those of which there is more to say.
NOT_WITH_OSMO = (
    "idle", "dry-run", "exec-prefix", "ssh-command", "local-addr", "background", "cold", "warm-idle", "fresh",
    "node-lost-after", "on-disconnect", "ssh-config", "connect-timeout", "no-settings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the line. `metavar` stands for its value in the help, "" for a switch; `read` makes the value.

    It fills the field of its name in `JobSpec` or `Access`, `timeout_s` for --timeout; flags.py has those that do more.
    """

    name: str
    help: str
    metavar: str = ""
    read: Callable[[str], object] = str
    repeats: bool = False


FLAGS = (
    Flag(
        "hosts", "hosts and their ranks: gpu-a:4,user@gpu-b:2222:2", "LIST", parse_hosts
    ),
    Flag("hostfile", "a file with a host a line: gpu-a slots=4", "FILE"),
    Flag("ssh-config", "OpenSSH configuration instead of ~/.ssh/config", "FILE"),
    Flag(
        "ssh-command",
        "reach hosts with the system's ssh program, such as ssh",
        "PROGRAM",
    ),
    Flag(
        "on",
        "nodes of a scheduler: slurm, slurm:LOGIN, slurm:JOB, slurm:LOGIN:JOB; sky: a cluster that SkyPilot launches; sky:NAME: one that is there; osmo; "
        "none: whatever has started this",
        "PLACE",
    ),
    Flag("nodes", "nodes of the allocation (1)", "N", number_of("--nodes")),
    Flag("gpus", "GPUs on each node of --on sky, with their kind: L4:4", "KIND[:N]"),
    Flag("sky", "task of SkyPilot whose resources and setup --on sky takes", "FILE"),
    Flag("gpus-per-node", "GPUs on each node, as sbatch takes them", "N"),
    Flag("partition", "partition of the allocation", "NAME"),
    Flag("time", "time limit of the allocation, as sbatch takes it: 2:00:00", "TIME"),
    Flag("account", "account that pays for it", "NAME"),
    Flag("qos", "its quality of service", "NAME"),
    Flag("constraint", "features that its nodes must have", "LIST"),
    Flag("cpus-per-task", "CPUs that the ranks of each node have together", "N"),
    Flag("mem", "memory of each node: 64G", "SIZE"),
    Flag("exclusive", "whole nodes"),
    Flag("reservation", "reservation to take the nodes from", "NAME"),
    Flag(
        "slurm",
        "any other option of sbatch; may be repeated",
        "NAME[=VALUE]",
        sbatch_option,
        repeats=True,
    ),
    Flag(
        "setup",
        "shell that every host runs before its Python: 'module load cuda'",
        "TEXT",
    ),
    Flag(
        "exec-prefix",
        "program that starts each host's Python: 'apptainer exec --nv image.sif'",
        "COMMAND",
    ),
    Flag(
        "idle",
        f"an allocation without a job ends after this time ({IDLE_S / 60:g}m)",
        "TIME",
        time_of("--idle"),
    ),
    Flag(
        "export",
        "reach no host, write files that start the same job on: " + ", ".join(SYSTEMS),
        "SYSTEM DIR",
    ),
    Flag("image", "container image of --on osmo, --export osmo and sing", "NAME"),
    Flag("results", "dataset or URL that gets what a job of OSMO writes", "NAME"),
    Flag(
        "connect-timeout",
        f"longest time to connect ({CONNECT_TIMEOUT_S:g}s)",
        "TIME",
        time_of("--connect-timeout"),
    ),
    Flag(
        "python",
        "interpreter of all hosts, or of one, or env:NAME; may be repeated",
        "[HOST=]PATH",
        python,
        repeats=True,
    ),
    Flag(
        "nproc-per-node",
        "ranks a host: N, gpu, cpu or auto",
        "N",
        lambda t: parse_slots(t, "--nproc-per-node"),
    ),
    Flag(
        "nnodes",
        "number of nodes, or the range of an elastic job",
        "MIN[:MAX]",
        nnodes,
    ),
    Flag(
        "max-restarts",
        "restarts of all ranks after a failure (0)",
        "N",
        number_of("--max-restarts"),
    ),
    Flag("rdzv-backend", "rendezvous: static or c10d", "NAME"),
    Flag("rdzv-endpoint", "address at which the nodes meet", "HOST[:PORT]"),
    Flag("rdzv-id", "name of the job at the rendezvous", "ID"),
    Flag(
        "master-port",
        "port on the first host (a free one)",
        "PORT",
        number_of("--master-port"),
    ),
    Flag("local-addr", "address that a node announces to the others", "ADDRESS"),
    Flag(
        "env",
        "variable of every rank, NAME alone: as here; may be repeated",
        "NAME[=VALUE]",
        repeats=True,
    ),
    Flag("cwd", "working directory on the hosts, instead of the run's own", "DIR"),
    Flag(
        "sync",
        "folder of this machine that hosts get a copy of, only what has changed",
        "DIR",
    ),
    Flag(
        "name",
        "name of the run's working directory on the hosts (the notebook's or script's)",
        "NAME",
    ),
    Flag(
        "fetch",
        "files that are brought here after the run: checkpoints/*.pt; may be repeated",
        "PATTERN",
        repeats=True,
    ),
    Flag(
        "devices",
        "GPUs of each host that the job may use, as soon as no other job has them: 0,1",
        "LIST",
        device_list,
    ),
    Flag("no-wait", "fail at once where another job has some of the --devices"),
    Flag(
        "no-settings",
        "ranks begin with the default settings of torch and logging, not with those that this process has made",
    ),
    Flag("fresh", "begin in an empty working directory"),
    Flag("timeout", "end the run after 90s, 10m or 2h", "TIME", time_of("--timeout")),
    Flag(
        "hang-timeout",
        "end the run when no rank advances for 5m",
        "TIME",
        time_of("--hang-timeout"),
    ),
    Flag(
        "grace",
        "time that ranks have to end after an interrupt or a timeout (30s)",
        "TIME",
        time_of("--grace"),
    ),
    Flag(
        "lease",
        f"how long ranks outlive a lost notebook ({LEASE_S:g}s)",
        "TIME",
        time_of("--lease"),
    ),
    Flag(
        "on-disconnect",
        "without the notebook for that long: stop (usual) or keep going",
        "WHAT",
    ),
    Flag(
        "node-lost-after",
        "a silent host is lost (10s)",
        "TIME",
        time_of("--node-lost-after"),
    ),
    Flag("detach", "return as soon as the job runs; it needs no notebook then"),
    Flag(
        "background",
        "return at once: the run goes on, and its view is live, while other cells run",
    ),
    Flag(
        "warm-idle",
        "how long hosts keep torch loaded for the next run (15m; 0: not at all)",
        "TIME",
        idle_time,
    ),
    Flag(
        "cold",
        "start every process anew: nothing is kept loaded, and nothing that is gets used",
    ),
    Flag(
        "payload-limit",
        f"largest captured data ({PAYLOAD_LIMIT_BYTES >> 20}M)",
        "SIZE",
        lambda t: parse_size(t, "--payload-limit"),
    ),
    Flag("whole", "run nothing here: the whole cell is every rank's program"),
    Flag("script", "the same, with arguments for sys.argv: --script -- 50 10"),
    Flag("dry-run", "print what every host would run; the cell is not executed"),
    Flag(
        "output",
        "variable that gets the run, also when it fails; without one it is _run until the next",
        "NAME",
        variable_name,
    ),
)
