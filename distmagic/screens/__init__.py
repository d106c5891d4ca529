"""Puts a run where a user looks: a notebook, a terminal, or a log.

    RunState  --render-->  text, HTML  --screen-->  what is seen

Only these modules write to notebook or terminal while a run goes on. All of it happens on the thread that calls; nothing
here starts a thread, asks a host, or decides anything about the run. Time is the run's own (`RunState.at_s`). The
interface, `Screen`, stands in render/screen.py. In this order:

    choose.py    which screen fits
    steady.py    a screen that fails does not end the run
    notebook.py  one output of a cell: live widgets, in the end text and HTML that need no kernel
    board.py     the live widgets; the only module that knows ipywidgets
    terminal.py  output of the ranks as it comes, and a status below it
    log.py       plain lines only
    lines.py     what terminal and log have in common: new lines of output, and writing
"""
