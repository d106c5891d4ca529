"""`JobSpec` describes what to run, without hosts. It checks all its values. Pure."""

from __future__ import annotations

import importlib.util
import re
import sys

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.remote.records.manifest import is_inside
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.request.flag_values import (
    ANY_TIME,
    DAY_S,
    Pairs,
    check_values,
    device_list,
    nnodes,
    option,
    parse_duration,
    time_or_zero,
    whole_number,
)
from distmagic.request.hosts import Slots, is_port, parse_slots, split_name

BACKENDS = ("static", "c10d")
ON_DISCONNECT = ("stop", "keep")
TRACKERS = ("tensorboard", "wandb", "mlflow")
PAYLOAD_LIMIT_BYTES = 256 << 20  # the default
_DEVICES = "CUDA_VISIBLE_DEVICES"  # AMD's GPUs use this variable, too
# The variables of --debug. NCCL's group COLL is left out: it would log each collective call.
_DEBUG = (
    ("NCCL_DEBUG", "INFO"),
    ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET"),
    ("TORCH_CPP_LOG_LEVEL", "INFO"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
)


def check_system() -> None:
    """Raise `UsageError` on Windows, whose processes, sockets and terminals differ."""
    if sys.platform == "win32":
        raise UsageError(
            "distmagic needs Linux or macOS on the notebook's side.",
            "On Windows, run Jupyter in WSL.",
        )


@frozen
class JobSpec:
    """One job, in torchrun's terms. None: not given, so that the plan decides.

    Each field is an option with a help text; times are in seconds. `nnodes` is (min, max). `env`
    are the variables of every rank, as (name, value). `devices` are GPU numbers on each host.
    Raises `UsageError`.
    """

    nproc_per_node: Slots | None = option(  # a field, as those below
        "torchrun",
        "ranks of each host: a number, gpu, cpu or auto (one for each GPU, or 1)",
        "N",
        read=parse_slots,
    )
    nnodes: tuple[int, int] | None = option(
        "torchrun",
        "number of nodes, or the range of an elastic job",
        "MIN[:MAX]",
        read=nnodes,
    )
    max_restarts: int = option(
        "torchrun",
        "restarts of all ranks after a failure (0)",
        "N",
        read=whole_number,
        within=(0, 1_000_000, "a number of restarts", "Use 0 to 1,000,000."),
        not_with="stay",
        default=0,
    )
    rdzv_backend: str | None = option(
        "torchrun", "rendezvous: static or c10d", "NAME", choices=BACKENDS
    )
    rdzv_endpoint: str | None = option(
        "torchrun", "address at which the nodes meet", "HOST[:PORT]"
    )
    rdzv_id: str | None = option("torchrun", "name of the job at the rendezvous", "ID")
    master_port: int | None = option(
        "torchrun",
        "port on the first host (a free one)",
        "PORT",
        read=whole_number,
        within=(1, 65535, "a port", "Use 1 to 65535."),
    )
    local_addr: str | None = option(
        "torchrun",
        "address that a node announces to the others",
        "ADDRESS",
        not_with="export workflow",
    )
    env: Pairs = option(
        "ranks",
        "variable of every rank; NAME alone: the notebook's value",
        "NAME[=VALUE]",
        repeats=True,
        argument="variables of every rank: a dict, or a tuple of pairs",
        default=(),
        is_secret=True,
    )
    sync: str | None = option(
        "ranks",
        "folder of this machine that hosts get a copy of; only changes are sent again",
        "DIR",
    )
    name: str | None = option(
        "ranks",
        "name of the run's working directory on the hosts (the notebook's or script's)",
        "NAME",
    )
    fetch: tuple[str, ...] = option(
        "ranks",
        "files that are copied to this machine after the run: checkpoints/*.pt",
        "PATTERN",
        repeats=True,
        not_with="export stay",
        default=(),
    )
    fresh: bool = option(
        "ranks",
        "start in an empty working directory",
        not_with="export workflow",
        default=False,
    )
    devices: tuple[str, ...] = option(
        "ranks",
        "GPUs of each host that the job may use; waits until no other job has them: 0,1",
        "LIST",
        read=device_list,
        not_with="export",
        default=(),
    )
    no_wait: bool = option(
        "ranks",
        "fail at once if another job has some of the devices",
        not_with="export",
        default=False,
    )
    no_settings: bool = option(
        "ranks",
        "ranks start with the default settings of torch and logging, not with the notebook's",
        not_with="export workflow",
        default=False,
    )
    debug: bool = option(
        "ranks",
        "NCCL and torch write detailed logs; the run notes what they show of the network",
        default=False,
    )
    cwd: str | None = option(
        "ranks", "working directory on the hosts, instead of the run's own", "DIR"
    )
    track: str | None = option(
        "ranks",
        "write metrics to a tracker during the run: tensorboard (folder runs/), wandb or mlflow",
        "NAME",
        choices=TRACKERS,
        not_with="export workflow",
    )
    timeout_s: float | None = option(
        "times",
        "end the run after 90s, 10m or 2h",
        "TIME",
        read=parse_duration,
        within=ANY_TIME,
        not_with="export stay",
        argument="end the run after this time",
    )
    hang_timeout_s: float | None = option(
        "times",
        "end the run if no rank advances for this time: 5m",
        "TIME",
        read=parse_duration,
        within=ANY_TIME,
        not_with="export stay",
        argument="end the run when no rank advances for this time",
    )
    grace_s: float = option(
        "times",
        "time for ranks to save and end after an interrupt or a timeout (30s; 0: none)",
        "TIME",
        read=time_or_zero,
        within=(0, DAY_S, "a time", "Use 0 seconds to a day; 30 is the default."),
        not_with="export",
        default=30.0,
    )
    node_lost_after_s: float = option(
        "times",
        "a host without a heartbeat for this time is lost (10s)",
        "TIME",
        read=parse_duration,
        within=(2, DAY_S, "a time", "Use 2 seconds to a day; 10 is the default."),
        not_with="export workflow",
        default=10.0,
    )
    on_disconnect: str = option(
        "times",
        "when the lease ends without the notebook: stop (default) or keep",
        "WHAT",
        choices=ON_DISCONNECT,
        not_with="export workflow",
        default="stop",
    )
    detach: bool = option(
        "times",
        "return as soon as the job runs; it needs no notebook then",
        not_with="export stay",
        default=False,
    )

    def __post_init__(self) -> None:
        _check_env(self.env)
        check_values(self)
        if self.nproc_per_node is not None:
            parse_slots(str(self.nproc_per_node), "--nproc-per-node")
        _check_rendezvous(self)
        for flag, value, instead in (
            (
                "--hang-timeout",
                self.hang_timeout_s,
                "%distributed stacks prints at any time where the ranks are.",
            ),
            ("--fetch", self.fetch, "the run that attach returns has run.fetch."),
            (
                "--track",
                self.track,
                "the run that attach returns has run.to_tensorboard.",
            ),
        ):
            if value and self.detach:
                raise UsageError(
                    f"{flag} needs a notebook that follows the job, and a job with --detach has none.",
                    f"Leave one of them out; {instead}",
                )
        _check_devices(self)
        if self.name is not None and not re.fullmatch(
            r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", self.name
        ):
            raise UsageError(
                f"--name {self.name!r} is not the name of a directory.",
                "Use letters, digits, and . _ - between them.",
            )
        for pattern in self.fetch:
            check_pattern(pattern, "--fetch")
        if self.track is not None:
            check_tracker("--track", self.track)
        if self.sync == "":
            raise UsageError(
                "--sync names no folder.",
                "Write --sync DIR; --sync . is the current directory.",
            )

    @property
    def variables(self) -> Pairs:
        """The variables of every rank: `env`, and those of `devices` and `debug` that `env` does
        not have.
        """
        variables = dict(self.env)
        if self.devices:
            variables[_DEVICES] = ",".join(self.devices)
        if self.debug:
            variables = {**dict(_DEBUG), **variables}
        return tuple(variables.items())

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        return self.nnodes is not None and self.nnodes[0] != self.nnodes[1]


def check_tracker(where: str, package: str) -> None:
    """Raise `UsageError` naming `where` if the package of an experiment tracker is not
    installed.
    """
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{where}: the package {package} is not installed on the notebook machine.",
            f"%pip install {package}",
        )


def check_pattern(pattern: str, where: str) -> None:
    """Raise `UsageError` naming `where` for a pattern that can't match a file below a run's working
    directory.
    """
    if not is_inside(pattern.removeprefix("./").removesuffix("/")):
        raise UsageError(
            f"{where} {pattern!r}: this is not a pattern of files in a run's working directory.",
            "Write checkpoints/*.pt, or **/*.pt.",
        )


def _check_env(env: Pairs) -> None:
    for name, _ in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"--env {name!r}: the name of a variable has letters, digits and _, and no digit first.",
                "Write --env NAME=VALUE.",
            )
        if name in TORCHRUN_VARIABLES:
            raise UsageError(
                f"--env {name}: torchrun sets this variable itself.", "Leave it out."
            )


def _check_devices(spec: JobSpec) -> None:
    for device in spec.devices:
        if not re.fullmatch(r"[A-Za-z0-9/:_-]+", device):
            raise UsageError(
                f"--devices {','.join(spec.devices)!r}: {device!r} is not a device.",
                "Write the numbers of GPUs as nvidia-smi has them: --devices 0,1.",
            )
    if len(set(spec.devices)) < len(spec.devices):
        raise UsageError(
            f"--devices {','.join(spec.devices)} names a device twice.", "Name it once."
        )
    if spec.no_wait and not spec.devices:
        raise UsageError(
            "--no-wait is for --devices that another job has, and there are no --devices.",
            "Add --devices 0,1, or leave it out.",
        )
    if spec.devices and _DEVICES in dict(spec.env):
        raise UsageError(
            f"--devices and --env {_DEVICES} both name devices.", "Keep one of them."
        )


def _check_rendezvous(spec: JobSpec) -> None:
    if spec.nnodes is not None:
        low, high = spec.nnodes
        if not 1 <= low <= high:
            raise UsageError(
                f"--nnodes {low}:{high} is not a range.", "Write --nnodes MIN:MAX."
            )
    if spec.is_elastic and spec.rdzv_backend == "static":
        raise UsageError(
            "--rdzv-backend static can't change the number of nodes.",
            "Use --rdzv-backend c10d.",
        )
    if spec.rdzv_endpoint is not None:
        # Its port takes precedence over --master-port.
        split_endpoint(spec.rdzv_endpoint)


def split_endpoint(text: str) -> tuple[str, int | None]:
    """Return (address, port or None) of `address`, `address:port` or `[IPv6]:port`.

    Raises `UsageError`.
    """
    address, ports = split_name(text)
    if not address or len(ports) > 1 or not all(map(is_port, ports)):
        raise UsageError(
            f"--rdzv-endpoint {text!r} is not address:port.", "Write 10.0.0.1:29500."
        )
    return address, int(ports[0]) if ports else None
