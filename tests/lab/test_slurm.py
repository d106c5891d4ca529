"""Lists of nodes are written out as real Slurm does it."""

import pytest

from distmagic.systems.slurm.nodelist import expand

pytestmark = pytest.mark.needs("lab", "slurm")


@pytest.mark.parametrize(
    "text",
    ["a[1-3,07-10]b[1-2],c", "x[1-2][1-2]", "gpu[008-011],z", "a", "p1n[1-2],p1n7"],
)
def test_names_are_written_out_as_scontrol_does(slurm, text):
    assert expand(text) == tuple(
        slurm.command("scontrol", "show", "hostnames", text).split()
    )
