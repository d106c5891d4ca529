"""The words of phases and stop reasons: every list that is kept of them has each of them."""

from dataclasses import fields
from typing import get_args, get_type_hints

from distmagic.remote.gang import datagrams
from distmagic.remote.wire.vocabulary import STOP_REASONS, known_stop_reason
from distmagic.render import rows
from distmagic.state import phases
from distmagic.state.builder import RunStateBuilder
from distmagic.state.model import RunState

NEVER_CHANGED = {
    "job", "before_s", "name", "began_unix_s", "began_up_s", "variable", "seen_unix_s",
    "cell",
}  # fmt: skip


def test_every_stop_reason_has_a_meaning_and_a_number_in_a_datagram():
    assert set(phases.STOP_MEANINGS) == set(STOP_REASONS)
    assert set(datagrams.REASONS) == {"", *STOP_REASONS}
    assert all(meaning.in_row for meaning in phases.STOP_MEANINGS.values())


def test_every_phase_of_a_rank_has_its_place_in_the_table():
    shown = {*get_args(phases.RankPhase), "reconnecting", "detached", "last seen"}
    assert set(rows.PHASES) == shown
    assert len(rows.PHASES) == len(set(rows.PHASES))


def test_a_reason_that_this_version_does_not_know_reads_stopped():
    assert known_stop_reason("") == known_stop_reason("\x1b[31mred") == "stopped"
    assert all(known_stop_reason(reason) == reason for reason in STOP_REASONS)


def test_the_builder_has_every_field_of_a_run_that_can_change():
    assert (
        set(get_type_hints(RunStateBuilder))
        == {field.name for field in fields(RunState)} - NEVER_CHANGED
    )
