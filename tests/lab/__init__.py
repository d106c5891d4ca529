"""A lab of real SSH hosts on this machine: `with Lab(3) as lab: ...`. Linux, root; see `Lab` and `LabHost`."""

from tests.lab.files import HostSetup
from tests.lab.host import LabHost
from tests.lab.isolation import is_isolated, isolate
from tests.lab.lab import Lab
from tests.lab.processes import HostProcess
from tests.lab.waiting import wait_until

__all__ = [
    "HostProcess",
    "HostSetup",
    "Lab",
    "LabHost",
    "is_isolated",
    "isolate",
    "wait_until",
]
