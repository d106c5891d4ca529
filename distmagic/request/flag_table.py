"""The table of all flags, from which the parser, the help text and completion are derived. Pure.

spec.py and access.py declare options; flags that only a command line has are declared here, and
read by flags.py.
"""

from __future__ import annotations

from distmagic.request.access import Access
from distmagic.request.allocation import IDLE_S
from distmagic.request.flag_values import (
    Flag,
    options_of,
    parse_duration,
    parse_size,
    rank_numbers,
    sbatch_option,
    variable_name,
    whole_number,
)
from distmagic.request.hosts import parse_hosts
from distmagic.request.spec import PAYLOAD_LIMIT_BYTES, JobSpec

NO_SYSTEM = "none"  # after --on

_OF_HOSTS = (
    Flag(
        "hosts",
        "hosts",
        "hosts and their ranks: gpu-a:4,user@gpu-b:2222:2",
        "LIST",
        read=lambda text, _: parse_hosts(text),
    ),
    Flag("hostfile", "hosts", "a file with one host per line: gpu-a slots=4", "FILE"),
)
_OF_A_SCHEDULER = (
    Flag(
        "on",
        "nodes",
        "nodes of a scheduler: PLACES; none: ignore the scheduler around this process",
        "PLACE",
        not_with="export",
    ),
    Flag(
        "gpus",
        "nodes",
        "type and number of GPUs on each node of --on sky: L4:4",
        "KIND[:N]",
    ),
    Flag(
        "sky",
        "nodes",
        "task of SkyPilot whose resources and setup --on sky takes",
        "FILE",
    ),
    Flag("nodes", "nodes", "nodes of the allocation (1)", "N", read=whole_number),
)
# Options for sbatch, under its own names.
_OF_SBATCH = (
    Flag("gpus-per-node", "nodes", "GPUs on each node, as sbatch takes them", "N"),
    Flag("partition", "nodes", "partition of the allocation", "NAME"),
    Flag(
        "time",
        "nodes",
        "time limit of the allocation, as sbatch takes it: 2:00:00",
        "TIME",
    ),
    Flag("account", "nodes", "account that pays for it", "NAME"),
    Flag("qos", "nodes", "its quality of service", "NAME"),
    Flag("constraint", "nodes", "features that its nodes must have", "LIST"),
    Flag("cpus-per-task", "nodes", "CPUs that the ranks of each node share", "N"),
    Flag("mem", "nodes", "memory of each node: 64G", "SIZE"),
    Flag("exclusive", "nodes", "whole nodes"),
    Flag("reservation", "nodes", "reservation to take the nodes from", "NAME"),
)
_OF_FILES = (
    Flag(
        "slurm",
        "nodes",
        "any other option of sbatch",
        "NAME[=VALUE]",
        read=sbatch_option,
        repeats=True,
    ),
    Flag(
        "idle",
        "nodes",
        f"an allocation without a job ends after this time ({IDLE_S / 60:g}m)",
        "TIME",
        read=parse_duration,
        not_with="export workflow",
    ),
    Flag(
        "export",
        "files",
        "reach no host; write files that start the same job on: SYSTEMS",
        "SYSTEM DIR",
    ),
    Flag(
        "image", "files", "container image of --on osmo, --export osmo and sing", "NAME"
    ),
    Flag(
        "results", "files", "storage URL that gets the files of a job of OSMO", "NAME"
    ),
)
_OF_THE_CELL = (
    Flag(
        "whole",
        "ranks",
        "run nothing in the notebook: the whole cell is every rank's program",
    ),
    Flag(
        "script",
        "ranks",
        "the same, with arguments for sys.argv: --script -- 50 10",
        not_with="stay",
    ),
    Flag(
        "stay",
        "ranks",
        "the whole cell runs on ranks that stay for the next one, under this name",
        "NAME",
        read=variable_name,
        not_with="workflow",
    ),
    Flag(
        "ranks",
        "ranks",
        "those of the ranks that stay on which the cell runs: 0,4-7 (all)",
        "LIST",
        read=rank_numbers,
        not_with="export workflow",
    ),
    Flag(
        "stay-idle",
        "times",
        "ranks that stay end after this time without a cell, and with idle GPUs: 30m (with the kernel)",
        "TIME",
        read=parse_duration,
        not_with="export workflow",
    ),
    Flag(
        "payload-limit",
        "ranks",
        f"largest captured data ({PAYLOAD_LIMIT_BYTES >> 20}M)",
        "SIZE",
        read=parse_size,
    ),
    Flag(
        "output",
        "ranks",
        "variable that gets the run, even if it fails (_run, until the next run)",
        "NAME",
        read=variable_name,
        not_with="export",
    ),
    Flag(
        "dry-run",
        "ranks",
        "print what every host would run; the cell is not executed",
        not_with="export workflow stay",
    ),
    Flag(
        "background",
        "times",
        "return at once: the run continues, with a live view, while other cells run",
        not_with="export workflow stay",
    ),
)

FLAGS = (
    *_OF_HOSTS,
    *_OF_A_SCHEDULER,
    *_OF_SBATCH,
    *_OF_FILES,
    *options_of(JobSpec).values(),
    *options_of(Access).values(),
    *_OF_THE_CELL,
)
SBATCH_FLAGS = tuple(flag.name for flag in _OF_SBATCH)
