"""Ranks that stay: torchrun starts them once, and each cell runs in the `__main__` that they keep.

    the cell's text  --following.prepared-->   CellParcel: the cell, and names of the notebook that it uses
    a first cell     --ranks.start-->          a run in the background whose ranks wait: its loop goes on between cells
    CellParcel       --Ranks.run_cell-->       RunCell, over the links that the loop has; the agent hands it on
    events           --control.Control-->      what the loop hears, on the thread of the cell
    events           --cell_state.take-->      CellState: the RunState of this cell alone
    RunState         --render, verdict-->      the cell's view, its `Run`, its error

A session is a job as any other: lease, losses of hosts, jobs, stop and attach are those of a run. Its loop never ends
between two cells, on a thread of its own. So the loss of a rank is known at once, and a cell costs one message each way.

A cell's state is folded from the same events, from its first on, by the same `fold`. For that `CellEnded` becomes the
`Ended` in it; when every rank of the cell has ended it, its nodes are gone to this state alone. Where the session ends,
its own events end the cell's state, and say why.

What follows the notebook: a name that a cell uses, that no cell on the ranks has given a value to, and that the
notebook has. A function goes without its globals, which are names of their own. What has not changed is not sent again.

An exception ends the cell on its rank. A second later the others are interrupted. An interrupt of the user stops all ranks
of the cell after the same step, the second one where they are, and the third one ends the session.

Never here: no cell runs in the notebook. Read in this order:

    following.py    which names follow, and the cell as a parcel; sends nothing
    modules.py      the user's modules as they are on disk, and which of them ranks lack
    cell_state.py   the state of one cell, pure
    stopping.py     the stages of an interrupt, pure
    out_of_step.py  whether process groups are of use for the next cell, pure
    control.py      what the session's loop asks of hosts for its cells, and what it hears
    ranks.py        `Ranks`: one session, for users and for the magics
"""
