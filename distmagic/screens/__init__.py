"""Puts a run where a user looks: a notebook, a terminal, or a log.

    RunState  --render-->  text, HTML  --screen-->  what is seen

Only these modules write to notebook or terminal while a run goes on. All of it happens on the thread that calls, which
is that of the run's loop, but for the words before a run; nothing here asks a host, or decides anything about the run.
Time is the run's own (`RunState.at_s`). The interface, `Screen`, stands in render/screen.py. In this order:

    choose.py    which screen fits
    announcing.py   what goes on before there is a run
    steady.py    a screen that fails does not end the run
    changed.py   each state with a change: the variable that has the run, the words of a terminal
    notebook.py  one output of a cell: text and HTML that need no kernel, and in a page the live view in its place
    cell_runs.py the runs of one cell, one after the other: a table of those that are over, and one view
    board.py     the live view: what a page is sent, and how often
    kept_lines.py   the lines of output that a page may ask for
    page_requests.py   what a page asks while the cell runs
    reloaded_pages.py  a page that is reloaded during a run gets its view back
    widget.py    carries the view into a page; the only module that knows anywidget
    page/        the page's side: plain ES modules, view.js first; and the looks of what can be clicked
    terminal.py  output of the ranks as it comes, and a status below it
    log.py       plain lines only
    lines.py     what terminal and log have in common: new lines of output, and writing
"""
