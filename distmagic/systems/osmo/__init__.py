"""A job as a workflow of OSMO, which no host of ours runs: it is submitted, and followed by its log.

Nothing here runs on a host of ours, but for what workflows carry. In this order:

    osmo_words.py    what the program `osmo` says: states, refusals, lines of a log      pure
    osmo.py          that program: submit, look, follow the log, cancel, fetch
    export.py        two forms: torchrun, and ranks by --size, --offset, --world_size    pure
    start_ranks.py   travels in that folder, for the second form: starts the ranks of a task
    run.py           a run of this notebook as a workflow: what it can't have, and what it carries
    workflow.py      submits it, and follows it to its end
    inside.py        the variables of a task                                             pure
"""
