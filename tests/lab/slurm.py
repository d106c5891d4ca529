"""Real Slurm over hosts of a lab: munged, slurmctld and slurmd from Debian's packages, with private files and ports.

    dm1         where users log in: Slurm's commands, no slurmd
    dm2 ...     the nodes
    the last    slurmctld, so that it can be away while the others are there

Every host has its own /run, and so its own munged at the usual place. /etc/slurm is the lab's on every host.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.waiting import HANG_S, wait_until
from tests.system.components import COMPONENTS

LOOK_S = 0.1  # between two questions to Slurm: each is a process
USER, UID = "ann", 2345  # an ordinary user of all hosts
_CGROUPS = Path("/sys/fs/cgroup")
_FREEZER, _MEMORY = _CGROUPS / "freezer", _CGROUPS / "memory"
_SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType={proctrack}
TaskPlugin={task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=900
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=60
KillWait=10
MinJobAge=300
SlurmdParameters=config_overrides
DebugFlags=NO_CONF_HASH
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
"""
# How long Slurm's programs try to reach a controller that is away. On nodes longer than it is ever away here: what tells
# it there that a step has ended sleeps for a minute after that, and the job does not end before.
_NODES_TRY_S, _LOGIN_TRIES_S, _LOGIN_GIVES_UP_S = 30, 10, 2
# main is the default; jobs of low give way to it; nobody has the account of closed; short allows 10 minutes
_PARTITIONS = """\
PartitionName=main Nodes={names} PriorityTier=10 Default=YES MaxTime=INFINITE DefaultTime=30
PartitionName=low Nodes={names} PriorityTier=1 MaxTime=INFINITE DefaultTime=30
PartitionName=closed Nodes={names} PriorityTier=10 AllowAccounts=staff
PartitionName=short Nodes={names} PriorityTier=10 MaxTime=10
"""


def has_cgroups() -> bool:
    """Whether Slurm can track processes by cgroups here, so that a step's end kills all that it has started."""
    return (_FREEZER / "release_agent").exists() and os.access(_FREEZER, os.W_OK)


def limits_memory() -> bool:
    """Whether Slurm can hold a job to the memory that it has asked for."""
    path = _MEMORY / "memory.limit_in_bytes"
    return has_cgroups() and path.exists() and os.access(_MEMORY, os.W_OK)


class SlurmLab:
    """A lab with Slurm, up inside a `with`. `tracks_by` says how Slurm finds the processes of a step.

    `shared_home` and `keep` are as of `Lab`.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        network: int | None = None,
        shared_home: bool = False,
        keep: tuple[Path, ...] = (),
    ) -> None:
        self.lab = Lab(nodes + 2, network=network, shared_home=shared_home, keep=keep)
        self.login, *middle = self.lab.hosts
        self.nodes, self.controller = tuple(middle[:-1]), middle[-1]
        self.tracks_by = "proctrack/cgroup" if has_cgroups() else "proctrack/linuxproc"
        self.folder = self.lab.folder / "slurm"

    def __enter__(self) -> SlurmLab:  # noqa: PYI034 - typing.Self is of Python 3.11
        return self.up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()

    # ---- power

    def up(self) -> SlurmLab:
        """Start all hosts and daemons, and return when all nodes are idle."""
        # Its user reads the keys of log-in, and Slurm's configuration.
        self.lab.folder.chmod(0o711)
        self._write_files()
        try:
            self.lab.up()
            for host in self.lab.hosts:
                self._prepare(host)
            self.start_controller()
            for host in self.nodes:
                self.start_node(host)
            wait_until(
                lambda: self._states() == {"idle"},
                "all nodes of Slurm to be idle",
                every_s=LOOK_S,
            )
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End all of it; safe to call twice."""
        self.lab.down()
        for host in self.nodes:
            for controller in (_FREEZER, _MEMORY):
                _remove_cgroups(controller / f"slurm_{self._node_name(host)}")

    def _write_files(self) -> None:
        self.folder.mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        address = self.controller.address
        text = _SLURM_CONF.format(
            controller=self.controller.name,
            controller_address=address,
            folder=self.folder,
            proctrack=self.tracks_by,
            task="task/cgroup" if limits_memory() else "task/none",
        )
        names = ",".join(self.names)
        for host in self.nodes:
            name = self._node_name(host)
            text += f"NodeName={name} NodeHostname={host.name} NodeAddr={host.address} CPUs=8 RealMemory=8000 Gres=gpu:2\n"
        text += _PARTITIONS.format(names=names)
        (self.folder / "slurm.conf").write_text(text)
        for host in self.nodes:
            own = f"{text}MessageTimeout={_NODES_TRY_S}\n"
            self._own_conf(host).write_text(own)
        self._set_patience_of_login(_LOGIN_TRIES_S)
        (self.folder / "gres.conf").write_text(
            "Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n"
        )
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
            "ConstrainRAMSpace=yes\n"
        )
        (self.folder / "plugstack.conf").write_text("")

    def _own_conf(self, host: LabHost) -> Path:
        """Return the file that is slurm.conf on a host."""
        return self.folder / f"{host.name}.conf"

    def _set_patience_of_login(self, seconds: int) -> None:
        """Have commands on the log-in node give up after this time; those that run already go on as they are."""
        text = (self.folder / "slurm.conf").read_text()
        # In place: a mount shows this very file.
        self._own_conf(self.login).write_text(f"{text}MessageTimeout={seconds}\n")

    def _node_name(self, host: LabHost) -> str:
        """Return Slurm's name of a host. It is no host name, and has this process in it: cgroups have it in theirs."""
        return f"p{os.getpid()}n{self.nodes.index(host) + 1}"

    @property
    def names(self) -> tuple[str, ...]:
        """What Slurm calls its nodes, in order."""
        return tuple(self._node_name(host) for host in self.nodes)

    def _prepare(self, host: LabHost) -> None:
        """Give a host its user, its directories, Slurm's configuration and a munged."""
        munged = COMPONENTS["munged"].path() or "munged"
        script = f"""
            set -eu
            echo '{USER}:x:{UID}:{UID}:an ordinary user:/home/{USER}:/bin/bash' >>/etc/passwd
            echo '{USER}:*:19000:0:99999:7:::' >>/etc/shadow
            mkdir -m 700 /home/{USER}; chown {UID}:{UID} /home/{USER}
            mkdir -p /run/munge /run/slurm/state /run/slurm/spool
            chmod 755 /run/munge /run/slurm
            cp {self.folder}/munge.key /run/munge/key; chmod 400 /run/munge/key
            mount -n --bind {self.folder} /etc/slurm
            [ ! -e {self._own_conf(host)} ] || mount -n --bind {self._own_conf(host)} /etc/slurm/slurm.conf
            {munged} --force --key-file=/run/munge/key --log-file=/run/munge/log --pid-file=/run/munge/pid \\
                --seed-file=/run/munge/seed --num-threads=2
        """
        _must(host, ["sh", "-c", script])

    def start_controller(self) -> None:
        """Start slurmctld, which goes on with the state that it had."""
        _must(self.controller, ["slurmctld"])
        self._set_patience_of_login(_LOGIN_TRIES_S)

    def stop_controller(self) -> None:
        """End slurmctld. Commands on the log-in node find that out soon."""
        self._set_patience_of_login(_LOGIN_GIVES_UP_S)
        _must(self.controller, ["sh", "-c", "kill $(cat /run/slurm/slurmctld.pid)"])
        wait_until(lambda: not _runs(self.controller, "slurmctld"), "slurmctld to end")

    def switch_off(self, host: LabHost) -> None:
        """Cut the power of a node, and have Slurm find it dead at once and not after its SlurmdTimeout."""
        host.kill()
        name = f"NodeName={self._node_name(host)}"
        _must(self.login, ["scontrol", "update", name, "State=DOWN", "Reason=test"])

    def switch_on(self, host: LabHost) -> None:
        """Give a node its power back. Slurm takes it back as soon as its slurmd registers (ReturnToService=2)."""
        host.start()
        self._prepare(host)
        self.start_node(host)

    def start_node(self, host: LabHost) -> None:
        """Start the slurmd of a node."""
        _must(host, ["slurmd", "-N", self._node_name(host)])

    # ---- looking at it

    def _states(self) -> set[str]:
        return set(self.command("sinfo", "-h", "-N", "-o", "%t").split())

    def command(self, *argv: str) -> str:
        """Run a command of Slurm as root on the log-in node, and return its output."""
        return self.login.exec(list(argv)).stdout

    def jobs(self) -> tuple[str, ...]:
        """Return the numbers of all jobs that have not ended."""
        return tuple(self.command("squeue", "-h", "-o", "%i").split())

    def mend(self) -> None:
        """Mend every cable and firewall, start what was stopped, end every job; return when all nodes are free."""
        for host in self.nodes:
            if not host.is_up:
                self.switch_on(host)
        for host in self.lab.hosts:
            host.mend_network()
        if not _runs(self.controller, "slurmctld"):
            self.start_controller()
        for host in self.nodes:
            if not _runs(host, "slurmd"):
                self.start_node(host)
        self.cancel_all()

    def cancel_all(self) -> None:
        """End every job, and return when all nodes are free."""
        told: set[str] = set()

        def are_free() -> bool:
            # Again and again: a controller that has just started may not answer yet, or take no order.
            jobs = set(self.jobs())
            if new := jobs - told:
                done = self.login.exec(["scancel", *sorted(new)])
                told.update(new if done.returncode == 0 else ())
            return not jobs and self._states() == {"idle"}

        wait_until(are_free, "no job of Slurm, and all nodes idle", every_s=LOOK_S)

    def assert_clean(self, within_s: float = HANG_S) -> None:
        """Assert that Slurm has no job, and that no host has a process or a file of distmagic's."""
        try:
            wait_until(
                lambda: not self.jobs(), "no job of Slurm", within_s, every_s=LOOK_S
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.command('squeue')}") from None
        self.lab.assert_clean(within_s)
        on_login = [name for name in self.login.files("/home") if "distmagic" in name]
        assert on_login == [], "there are files of distmagic's on the log-in node"
        for host in self.nodes:
            names = host.files("/home") if host.is_up else ()
            logs = [name for name in names if ".distmagic-slurm-" in name]
            assert logs == [], "the output of batch scripts was left"


def _must(host: LabHost, argv: list[str]) -> None:
    done = host.exec(argv)
    assert done.returncode == 0, f"{host.name}: {argv[-1]}: {done.stdout}{done.stderr}"


def _remove_cgroups(top: Path) -> None:
    """Remove a tree of cgroups, whose processes have ended with their host."""

    def is_gone() -> bool:
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                return False
        return True

    if top.exists():
        wait_until(is_gone, f"the cgroups of {top.name} to go")


def _runs(host: LabHost, name: str) -> bool:
    return any(process.name == name for process in host.processes())
