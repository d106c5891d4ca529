"""One rank: the process that torchrun starts, which calls the user's function and reports its progress and its end.

Here: everything that runs in the user's own process, so it is small, and imports torch only where the user's code has.
Never here: no decision about other ranks, no waiting for the agent except at the very end, and no exception of ours in
the user's code. Read in this order:

    worker.py      `main`: connects to the agent, calls the function, reports pauses and the end
    script.py      a script or a module as the rank's program, in place of a function
    import_paths.py  where the user's own modules are
    stay.py        a rank that stays: one cell after the other
    report.py      `distmagic.report` and `distmagic.track`
    show.py        `distmagic.show`: a picture, on its way to the agent
    outbox.py      what was reported, on its way to the agent
    sources.py     the text of cells, for tracebacks and `inspect.getsource`
    bars.py        bars of tqdm become bars of the rank
    rich_bars.py   progress displays of rich, as Lightning has them, become bars of the rank
    logged_numbers.py  numbers that tqdm, Transformers, Lightning and Accelerate log become metrics of the rank
    checkpoint.py  `distmagic.checkpoint`: snapshots that survive the loss of a host
    calls.py       answers which collective calls the rank has made
    stacks.py      answers a signal with the stacks of all threads, and reads such answers
"""
