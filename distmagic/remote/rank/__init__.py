"""One rank: the process that torchrun starts, which calls the user's function and reports its
progress and its end.

This code runs in the user's own process, so it is small, and imports torch only after the user's
code has. It takes no decision about other ranks, and waits for the agent only at the very end. It
raises none of its own exceptions in the user's code. Read in this order:

    worker.py      `main`: connects to the agent, calls the function, reports pauses and the end
    ending.py      how a rank ends: its result, its traceback, its exit
    script.py      runs a script or a module instead of a function
    stay.py        a rank that stays alive and runs one cell after the other
    report.py      `distmagic.report` and `distmagic.track`
    show.py        `distmagic.show`: sends a picture to the agent
    outbox.py      sends reports to the agent without waiting for it
    sources.py     the text of cells, for tracebacks and `inspect.getsource`
    bars.py        shows bars of tqdm as bars of the rank
    rich_bars.py   shows progress displays of rich, which Lightning uses, as bars of the rank
    logged_numbers.py  reports what tqdm, Transformers, Lightning and Accelerate log as metrics
    checkpoint.py  `distmagic.checkpoint`: snapshots that survive the loss of a host
    calls.py       reports the collective calls that the rank has made
    stacks.py      writes the stack traces of all threads on a signal, and reads such answers
"""
