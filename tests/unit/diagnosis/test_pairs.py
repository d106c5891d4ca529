"""Which hosts are slow together: a slow link is told from a slow host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from distmagic.diagnosis.finding import Finding
from distmagic.diagnosis.pairs import HostPair, findings
from distmagic.diagnosis.report import report, with_failure, with_pairs, without_pairs
from distmagic.errors import RunError
from distmagic.remote.checkup.collective import (
    RankPair,
    Speed,
    next_alone,
    rounds,
)
from tests.unit.diagnosis import healthy

FAST, SLOW = 1.2e9, 0.6e9
PROMPT, LATE = 60e-6, 5e-3


def pairs(
    count: int, slow: set[Any], late: Collection[Any] = ()
) -> dict[HostPair, Speed]:
    """Return the speeds of pairs; those in `slow` or `late`, or with a host in them, are bad."""
    speeds = {}
    for one, other in sorted(pair for some in rounds(count) for pair in some):
        names = {one, other, (one, other)}
        speeds[f"gpu-{one}", f"gpu-{other}"] = (
            LATE if names.intersection(late) else PROMPT,
            SLOW if names & slow else FAST,
        )
    return dict(sorted(speeds.items()))


def found(measured: dict[HostPair, Speed]) -> list[Finding]:
    subjects = {f"gpu-{number}": one for number, one in enumerate(healthy(18))}
    return findings(measured, list(measured), subjects)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16])
def test_equal_pairs_have_no_finding(count):
    assert found(pairs(count, set())) == []


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_a_slow_host_is_told_from_a_slow_link(count):
    (host,) = found(pairs(count, {1}))
    assert (host.host, host.check) == ("gpu-1", "bandwidth")
    link = next(pair for pair in pairs(count, set()) if "gpu-1" in pair)
    one, other = (int(name.removeprefix("gpu-")) for name in link)
    (finding,) = found(pairs(count, {(one, other)}))
    assert finding.check == f"bandwidth with {link[0]}"
    (finding,) = found(pairs(count, set(), {(one, other)}))
    assert finding.check == f"latency with {link[0]}"


# ---- pairs that are measured again alone


def with_speeds(
    speeds: dict[RankPair, Speed], judged: Collection[RankPair] = ()
) -> set[tuple[str, str]]:
    """Return host and subject of each finding; without `judged`, all pairs are."""
    names = tuple(f"gpu-{number}" for number in range(1, 19))
    said = with_pairs(report(healthy(18), "2.13.0"), speeds, judged or speeds, 0.0)
    assert said.hosts == names
    return {(one.host, one.check) for one in said.findings}


def measured_again(speeds: dict[RankPair, Speed], alone: dict[RankPair, Speed]) -> None:
    """Measure again what stands out, at most twice a pair; `alone` has the speeds without other pairs."""
    tries: Counter[RankPair] = Counter()
    while (pair := next_alone(speeds, tries)) and tries[pair] < 2:
        tries[pair] += 1
        (late, rate), (latency_s, bytes_per_s) = speeds[pair], alone[pair]
        speeds[pair] = (min(late, latency_s), max(rate, bytes_per_s))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_pairs_that_slow_each_other_down_are_no_finding_if_they_are_fast_alone(
    count, seed
):
    chance = random.Random(seed)
    alone = {pair: (PROMPT, FAST) for some in rounds(count) for pair in some}
    together = {
        pair: (PROMPT / chance.uniform(0.01, 1), FAST * chance.uniform(0.5, 1))
        for pair in alone
    }
    together[rounds(count)[0][0]] = (PROMPT, FAST * 0.3)
    assert with_speeds(together)
    measured_again(together, alone)
    assert with_speeds(together) == set()


@pytest.mark.parametrize("count", [3, 8, 16])
def test_pairs_that_had_no_turn_in_time_are_no_finding(count):
    """All share an uplink, and a quarter of it is theirs while others use it."""
    speeds = {pair: (PROMPT, FAST / 4) for some in rounds(count) for pair in some}
    speeds[rounds(count)[0][0]] = (PROMPT, FAST / 8)
    tries: Counter[RankPair] = Counter()
    while pair := next_alone(speeds, tries):
        tries[pair] += 1
        speeds[pair] = (PROMPT, FAST)
        assert with_speeds(speeds, tries) == set()
    assert tries.keys() == speeds.keys()


@pytest.mark.parametrize("turns", [3, 4, 5, 16])
def test_a_slow_host_is_found_where_time_is_over_after_its_own_pairs(turns):
    every = [pair for some in rounds(8) for pair in some]
    alone = {pair: (PROMPT, SLOW if 1 in pair else FAST) for pair in every}
    together = {pair: (PROMPT, rate * 0.9) for pair, (_, rate) in alone.items()}
    tries: Counter[RankPair] = Counter()
    while len(tries) < turns and (pair := next_alone(together, tries)):
        tries[pair] += 1
        together[pair] = alone[pair]
    assert with_speeds(together, tries) == {("gpu-2", "bandwidth")}


def test_a_slow_pair_is_measured_three_times_at_most():
    speeds = {pair: (PROMPT, FAST) for some in rounds(4) for pair in some}
    speeds[0, 1] = (PROMPT, SLOW / 2)
    tries: Counter[RankPair] = Counter()
    while pair := next_alone(speeds, tries):
        tries[pair] += 1
    assert tries == {**dict.fromkeys(speeds, 1), (0, 1): 3}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [3, 4, 5, 8, 16])
def test_a_slow_link_and_a_slow_host_are_slow_alone(count, seed):
    """A half of the bandwidth may be most of it while other pairs are measured."""
    chance = random.Random(seed)
    every = [pair for some in rounds(count) for pair in some]
    one, other = every[0]
    link = (f"gpu-{other + 1}", f"bandwidth with gpu-{one + 1}")
    host = ("gpu-2", "bandwidth")
    for slow, found in (
        ({(one, other)}, link),
        ({pair for pair in every if 1 in pair}, host),
    ):
        alone = {pair: (PROMPT, SLOW if pair in slow else FAST) for pair in every}
        together = {
            pair: (PROMPT, min(rate, FAST * chance.uniform(0.2, 1)))
            for pair, (_, rate) in alone.items()
        }
        together[every[-1]] = (LATE, SLOW)
        measured_again(together, alone)
        assert with_speeds(together) == {found}


def test_slow_pairs_are_first_then_the_others_and_then_slow_ones_again():
    first, second, third = every = (0, 1), (0, 2), (1, 2)
    speeds = {first: (PROMPT, SLOW / 2), second: (PROMPT, FAST), third: (PROMPT, SLOW)}
    tries: Counter[RankPair] = Counter()
    for expected in (third, first, second, third, first):
        assert next_alone(speeds, tries) == expected
        tries[expected] += 1
    speeds = dict.fromkeys(every, (PROMPT, FAST))
    assert next_alone(speeds, Counter()) is None
    assert next_alone(speeds, Counter([first])) == second
    assert next_alone(speeds, tries) is None


def test_a_single_pair_is_not_measured_again():
    assert next_alone({(0, 1): (LATE, SLOW)}, Counter()) is None


# ---- rounds, and reports


@pytest.mark.parametrize("count", range(1, 18))
def test_each_rank_meets_several_others_and_is_in_one_pair_at_a_time(count):
    met: dict[int, set[int]] = {rank: set() for rank in range(count)}
    for some in rounds(count):
        ranks = [rank for pair in some for rank in pair]
        assert len(set(ranks)) == len(ranks)
        for one, other in some:
            assert one < other < count
            assert other not in met[one], "a pair is measured once"
            met[one].add(other)
            met[other].add(one)
    assert min(len(others) for others in met.values()) >= min(count - 1, 3) - (
        count % 2 and count > 3
    )


def test_a_report_with_pairs(golden):
    before = report(healthy(3), "2.13.0")
    results = {
        (0, 1): (PROMPT, FAST),
        (0, 2): (PROMPT, SLOW),
        (1, 2): (LATE, SLOW),
    }
    golden(with_pairs(before, results, results, 0.0))


def test_speeds_that_errors_prevent_are_not_just_missing(golden):
    said = without_pairs(report(healthy(2), "2.13.0"))
    assert [one.check for one in said.findings] == ["collective"]
    assert not said.has_errors
    golden(said)


def test_a_run_that_fails_is_a_finding(golden):
    said = with_failure(report(healthy(2), "2.13.0"), RunError("It hung.", "Wait."))
    assert said.has_errors
    golden(said)


def test_cures_have_the_card_and_the_address_that_the_hosts_use():
    (host,) = found(pairs(4, {1}))
    assert "ssh gpu-2 ethtool eth0" in host.cure  # the second of `healthy`
    (link,) = found(pairs(4, {(0, 3)}))
    assert "iperf3 -c 10.0.0.1" in link.cure
