"""What goes between a cell and the loop of its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event
from distmagic.staying.control import Control


def test_a_new_link_gets_the_cell_and_its_interrupts_again():
    first, other, new = (SimpleNamespace(python=(3, 12)) for _ in range(3))
    control = Control()
    cell = p.RunCell(cell=4, ranks=(0, 1))
    park, interrupt = (
        p.ParkAtStep(cell=4, ranks=(0, 1)),
        p.InterruptCell(cell=4, ranks=(0, 1)),
    )

    def sent(*links: Any) -> list[tuple[tuple[Any, ...], object]]:
        found = control.sends(dict(enumerate(links)))
        return [(one.links, one.message) for one in found]

    control.begin(cell)
    assert sent(first, other) == [((first, other), cell)]
    control.ask(park)
    control.ask(interrupt)
    assert sent(first, other) == [((first, other), park), ((first, other), interrupt)]
    assert sent(first, other) == []
    assert sent(first, new) == [((new,), cell), ((new,), interrupt)]
    ended = p.OthersEnded(cell=4, ranks=(1,), ended=(0,))
    control.ask(ended)
    assert sent(first, other)[2:] == [((first, other), ended)]
    assert sent(first, new) == [((new,), cell), ((new,), interrupt), ((new,), ended)]
    control.begin(p.RunCell(cell=5, ranks=(0,)))
    assert [message.cell for _, message in sent(first, new)] == [5]


def test_an_interrupt_that_waits_to_be_sent_is_sent_although_the_next_cell_begins():
    control = Control()
    first, second = (p.RunCell(cell=number, ranks=(0,)) for number in (1, 2))
    control.begin(first)
    links: Any = {0: SimpleNamespace(python=(3, 12))}
    control.sends(links)
    control.end()
    interrupt = p.InterruptCell(cell=1, ranks=(0,))
    control.ask(interrupt)
    control.begin(second)
    assert [one.message for one in control.sends(links)] == [second, interrupt]


def test_the_cell_of_another_kernel_takes_the_ranks_until_they_are_taken_back():
    def hear(cell: int) -> None:
        began = p.CellBegan(cell=cell, rank=0)
        control.hear([Event(node_rank=0, at_s=1.0, what=began)])

    control = Control()
    control.begin(p.RunCell(cell=1, ranks=(0,)))
    hear(1)
    control.end()
    assert not control.is_taken
    hear(2)
    assert control.is_taken
    assert control.take_over().last == 2
    assert not control.is_taken
    control.begin(p.RunCell(cell=3, ranks=(0,)))
    hear(3)
    assert not control.is_taken


def printed(text: str, rank: int = 0) -> Event:
    what = p.Output(rank=rank, stream="stdout", offset=0, text=text)
    return Event(node_rank=0, at_s=1.0, what=what)


def test_output_between_two_cells_is_shown_with_the_next_one_of_the_user():
    control = Control()
    control.begin(p.RunCell(cell=1, ranks=(0,), text="1"))
    control.end()
    first, second, third = map(printed, ("a", "b", "c"))
    control.hear([first])
    control.begin(p.RunCell(cell=2, ranks=(0,)))
    assert control.heard(0.0) == []
    control.end()
    control.hear([second])
    control.begin(p.RunCell(cell=3, ranks=(0,), text="2"))
    control.hear([third])
    assert control.heard(0.0) == [first, second, third]
    control.end()
    control.hear([first])
    control.take_over()  # another kernel's cells have printed it
    control.begin(p.RunCell(cell=4, ranks=(0,), text="3"))
    assert control.heard(0.0) == []


def test_output_of_a_rank_without_a_cell_waits_for_its_next_one():
    control = Control()
    first, second, third = (printed(text, rank=1) for text in "abc")
    of_torchrun = printed("t", rank=-1)
    control.hear([first, of_torchrun])
    control.begin(p.RunCell(cell=1, ranks=(0,), text="1"))
    assert control.heard(0.0) == [of_torchrun]
    control.hear([second])
    control.heard(0.0)
    control.hear([third])  # the cell is about to end, and its view looks no more
    control.hear([of_torchrun])
    control.end()
    control.begin(p.RunCell(cell=2, ranks=(0, 1), text="2"))
    assert control.heard(0.0) == [first, second, third, of_torchrun]
    control.end()
    control.begin(p.RunCell(cell=3, ranks=(0, 1), text="3"))
    assert control.heard(0.0) == []


def test_a_rank_that_prints_much_between_two_cells_pushes_out_no_other_rank():
    control = Control()
    first, last = printed("first", rank=1), printed("last", rank=1)
    many = [printed(str(number)) for number in range(200)]
    control.hear([first, *many, last])
    control.begin(p.RunCell(cell=1, ranks=(0, 1), text="1"))
    assert control.heard(0.0) == [first, *many[-98:], last]


def test_the_cell_of_another_kernel_with_the_same_number_takes_the_ranks():
    def hear(kernel: str) -> None:
        began = p.CellBegan(cell=1, rank=0, kernel=kernel)
        control.hear([Event(node_rank=0, at_s=1.0, what=began)])

    control = Control()
    control.begin(p.RunCell(cell=1, ranks=(0,), kernel=control.kernel))
    hear(control.kernel)
    hear("")  # from ranks of an older version
    assert not control.is_taken
    hear(Control().kernel)
    control.end()
    assert control.is_taken
    assert control.take_over().last == 1
    assert not control.is_taken
