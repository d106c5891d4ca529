"""Runs a job as an OSMO workflow: distmagic submits it and follows its log.

OSMO starts the processes; distmagic itself starts none on those machines, except by the files in
the workflow. Read in this order:

    osmo_words.py    parses output of the program `osmo`: states, refusals, lines of a log   pure
    osmo.py          runs that program: submit, query, follow the log, cancel, fetch
    export.py        two forms: torchrun, and ranks by --size, --offset, --world_size        pure
    start_ranks.py   copied into that folder, for the second form: starts the ranks of a task
    run.py           a run as a workflow: flags that it does not support, and its files
    workflow.py      submits a workflow, and follows it to its end
    inside.py        the variables of a task                                                 pure
"""
