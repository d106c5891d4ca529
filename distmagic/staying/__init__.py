"""Ranks that stay alive between cells: torchrun starts them once, and each cell runs in the
`__main__` of every rank.

    the cell's text  --following.prepared-->  CellParcel: the cell, and the names of the notebook
                                              that it uses
    a first cell     --starting.start-->      a background run whose ranks wait for cells
    CellParcel       --Ranks.run_cell-->      RunCell, sent over the links of the run's loop; the
                                              agent forwards it
    events           --control.Control-->     the events that the loop received, on the thread of
                                              the cell
    events           --cell_state.take-->     CellState: the RunState of this cell alone
    RunState         --render, verdict-->     the cell's view, its `Run`, its error

In this package, a session is one background job with its ranks. It has the lease, the loss of
hosts, `jobs`, `stop` and `attach` of any job. Its loop runs on its own thread and never ends
between two cells. So the loss of a rank is noticed at once, and a cell costs one message in each
direction.

The same `fold` makes a cell's state from the session's events, starting with the cell's first one.
For that, `CellEnded` is replaced by the `Ended` in it. When every rank has ended the cell, its
nodes count as gone in this state only. If the session ends, its own events end the cell's state and
give the reason.

A name of the notebook is sent with a cell if the cell uses it and no cell on the ranks has assigned
it. A function is sent without its globals, which are sent as separate names. Unchanged values are
not sent again.

An exception ends the cell on its rank. The other ranks are interrupted one second later. Ranks that
run on get the counts of calls of those that have ended the cell. A rank that waits for such a rank,
or for one that does not run the cell, breaks its process groups and fails. The user's first
interrupt stops all ranks of the cell after the same step. The second one stops them where they are,
and the third one ends the session.

With `--on-disconnect keep` the ranks outlive the kernel: the job goes on as any such job, and its
lead ends it when no cell has run for the time of `--stay-idle`. A kernel that attaches reads the
job's journal from the first event on, so that `Past` has the cells, names and process groups. Its
first cell is an empty one. Its number shows the former kernel that the ranks are no longer its own.

No cell runs in the notebook. Read in this order:

    following.py    packs a cell with the names that it needs; sends nothing
    modules.py      the user's modules as they are on disk, and which of them ranks lack
    cell_state.py   the state of one cell, pure
    stopping.py     the stages of an interrupt, pure
    out_of_step.py  whether the next cell can still use the process groups, pure
    idle.py         how long the ranks have been without a cell, and when that ends them
    past.py         what ranks have done so far, also for a kernel that attaches, pure
    holdings.py     what the ranks have, as text, pure
    control.py      passes requests and events between a cell and the session's loop
    cell_runner.py  runs cells on the ranks of one session, one after the other
    ranks.py        `Ranks`: one session, for users and for the magics
    starting.py     starts the ranks of a session, or attaches to those that another kernel has left
"""
