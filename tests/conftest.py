"""What all tests share: a network that nothing leaves, the lab of SSH hosts, and the rule for missing components."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings

# jsonschema, which nbformat imports, builds a grammar of IRIs with this library if it is there: four seconds in each
# worker of pytest-xdist, for a check that no notebook needs. With None its import fails, which jsonschema allows for.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

pytest.register_assert_rewrite("tests.builders.golden")

from tests import REPOSITORY  # noqa: E402
from tests.builders.forks import Forks  # noqa: E402
from tests.builders.golden import COLLECTED, MESSAGES, Golden, read  # noqa: E402
from tests.lab import HostSetup, Lab, isolate  # noqa: E402
from tests.lab.slurm import SlurmLab  # noqa: E402
from tests.system.components import in_ci, reason_without  # noqa: E402
from tests.tiers import NAME, sort_into_tier, takes_long  # noqa: E402

# No test is timed: a busy machine would make a slow example a failure.
settings.register_profile("distmagic", deadline=None)
# Of `make check` and `make test`: a third of the examples, but where a property says how many it needs, and always the same.
settings.register_profile("quick", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("distmagic")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden messages (see tests/builders/golden.py) can be renewed."""
    parser.addoption(
        "--renew-golden",
        action="store_true",
        help="write the golden messages of the tests that run, instead of comparing them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave the machine's network before there are threads; each worker of pytest-xdist does so for itself.

    Each has a home of distmagic's own, too, and one of IPython's, where all kernels write into one history: what others
    have kept, list or remove in the user's is not theirs.
    """
    # Of a shell's job in the background: every program that a test starts would ignore Ctrl-C, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("DISTMAGIC_HOME", "IPYTHONDIR"):
        home = tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True)
        os.environ[name] = home.name
        config.add_cleanup(home.cleanup)
    if (
        sys.platform.startswith("linux")
        and os.geteuid() == 0
        and not reason_without("ip")
    ):
        isolate()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Sort tests into tiers, before marks deselect any and before xdist adds its groups to their names.

    Keep which tests there are: an entry of golden messages must be of one of them.
    """
    config.stash[COLLECTED] = {
        item.nodeid: "golden" in getattr(item, "fixturenames", ()) for item in items
    }
    for item in items:
        item.stash[NAME] = item.nodeid
        sort_into_tier(item)
    items.sort(key=lambda item: not takes_long(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """End the comparing of a test that has passed."""
    outcome = yield
    if golden := getattr(item, "funcargs", {}).get("golden"):
        golden.finish()
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Renew a test's golden messages when all of its fixtures are gone."""
    outcome = yield
    if golden := getattr(item, "funcargs", {}).get("golden"):
        golden.close()
    return outcome


@pytest.fixture(scope="session")
def golden_messages() -> dict[str, str]:
    """Return all entries, read before any test plays that files can't be read."""
    pages = MESSAGES.glob("*.txt")
    return {entry: texts for page in pages for entry, texts in read(page).items()}


@pytest.fixture
def golden(
    request: pytest.FixtureRequest,
    golden_messages: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Golden:
    """Compare what users read with tests/golden/messages: `golden(error)`, `golden(text)`."""
    entry = request.node.nodeid.removeprefix("tests/")
    return Golden(
        entry,
        golden_messages.get(entry, ""),
        tmp_path_factory.getbasetemp(),
        is_renewed=request.config.getoption("renew_golden"),
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what has been imported by now out of garbage collections: the many runs of the tests make one each.

    They come less often, too, where no test is like a user's notebook, whose memory is looked at.
    """
    gc.collect()
    gc.freeze()
    # Each run that lasts asks whether anything is frozen, and to count it takes a tenth of a second.
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen
    if all(item.get_closest_marker("needs") is None for item in session.items):
        gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what can't run on this machine, by `@pytest.mark.needs("fish")`."""
    for mark in item.iter_markers("needs"):
        _require(*mark.args)


def _require(*names: str) -> None:
    if reason := reason_without(*names):
        pytest.fail(f"CI: {reason}", pytrace=False) if in_ci() else pytest.skip(reason)


def _forks(modules: str) -> Iterator[Forks]:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    forks = Forks(f"import {modules}", env)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Forks]:
    """Start Pythons that have loaded torch, and nothing of distmagic: it takes more than a second each time."""
    yield from _forks("torch.distributed.run, torch.utils.data")


@pytest.fixture(scope="session")
def compiler_forks() -> Iterator[Forks]:
    """Start Pythons that have loaded torch's compiler, too, as DistributedDataParallel does, and for seconds."""
    yield from _forks("torch.distributed.run, torch.utils.data, torch._dynamo")


@pytest.fixture(scope="session")
def session_lab() -> Iterator[Lab]:
    """Three hosts with separate homes, up for the whole session. Tests ask for `lab`, which looks after it."""
    _require("lab")
    # Whichever other labs there were before: addresses stand in messages.
    with Lab(3, network=0) as lab:
        yield lab


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """Three hosts with separate homes, whole and clean before the test; what the test broke is mended after it."""
    session_lab.mend()
    yield session_lab
    session_lab.mend()


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Return a function that starts a lab of its own for this test: `make_lab(2, shared_home=True)`."""
    _require("lab")
    labs: list[Lab] = []

    def make(
        count: int,
        *,
        shared_home: bool = False,
        shared_tmp: bool = False,
        setups: tuple[HostSetup, ...] = (),
    ) -> Lab:
        made = Lab(count, shared_home=shared_home, shared_tmp=shared_tmp, setups=setups)
        labs.append(made)
        return made.up()

    yield make
    for made in labs:
        made.down()


@pytest.fixture(scope="session")
def session_slurm() -> Iterator[SlurmLab]:
    """Slurm on a log-in node and two others, up for the whole session. Tests ask for `slurm`."""
    _require("lab", "slurm")
    with SlurmLab(2) as slurm:
        yield slurm


@pytest.fixture
def slurm(session_slurm: SlurmLab) -> Iterator[SlurmLab]:
    """Slurm without a job before the test and after it."""
    session_slurm.mend()
    yield session_slurm
    session_slurm.mend()
