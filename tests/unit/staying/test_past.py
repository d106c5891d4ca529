"""What a kernel that attaches to ranks reads of their cells so far."""

from __future__ import annotations

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event
from distmagic.staying.past import Past, take


def began(
    cell: int, rank: int, text: str = "", *, is_users: bool = True
) -> p.CellBegan:
    return p.CellBegan(cell=cell, rank=rank, is_users=is_users, text=text)


def ended(cell: int, rank: int, *names: str) -> p.CellEnded:
    end = p.Ended(rank=rank, restart=0, outcome="returned", result_bytes=0)
    return p.CellEnded(cell=cell, rank=rank, ended=end, names=names, value="AA==")


def told(*messages: p.CellBegan | p.CellEnded) -> Past:
    return take(Past(), [Event(node_rank=0, at_s=0.0, what=one) for one in messages])


def test_it_has_texts_names_and_the_last_ends_of_the_users_cells():
    past = told(
        began(1, 0, "a = 1"), began(1, 1), ended(1, 0, "a"), ended(1, 1, "a"),
        began(2, 1, "b = a"), ended(2, 1, "a", "b"),
        began(3, 0, is_users=False), ended(3, 0, "a", "c"),
    )  # fmt: skip
    assert past.last == 3
    assert past.texts == {1: "a = 1", 2: "b = a"}
    assert past.names == {0: {"a", "c"}, 1: {"a", "b"}}
    assert {rank: end.cell for rank, end in past.ends.items()} == {0: 1, 1: 2}
    assert past.ends[0].value == ""
    assert past.running == {}


def test_cells_that_raised_or_exited_have_failed_and_interrupted_ones_have_not():
    def broke(cell: int, rank: int, outcome: str) -> p.CellEnded:
        end = p.Ended(rank=rank, restart=0, outcome=outcome, code=1)
        return p.CellEnded(cell=cell, rank=rank, ended=end)

    past = told(
        began(1, 0), began(1, 1), ended(1, 0), broke(1, 1, "raised"),
        began(2, 0), broke(2, 0, "signalled"),
        began(3, 0), ended(3, 0),
        began(4, 0), broke(4, 0, "exited"),
    )  # fmt: skip
    assert past.failed == {1, 4}


def test_nodes_tell_in_any_order_and_a_cell_may_still_run():
    """The events of one node come in their order, those of several in any."""
    past = told(began(1, 1), ended(1, 1), began(2, 1), began(1, 0, "a = 1"))
    assert past.ends[1].cell == 1
    assert {rank: one.cell for rank, one in past.running.items()} == {0: 1, 1: 2}
    assert (past.last, past.texts) == (2, {1: "a = 1"})
    assert past.at_work == (1,)
