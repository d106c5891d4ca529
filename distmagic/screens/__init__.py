"""Shows a run to the user: in a notebook, a terminal, or a log.

    RunState  --render-->  text, HTML  --screen-->  what is seen

During a run, only these modules write to the notebook or the terminal. They run on the caller's
thread, which is the thread of the run's loop, except for messages before a run. They contact no
host and decide nothing about the run. Times are seconds of the run (`RunState.at_s`). The
interface, `Screen`, is in render/screen.py. Read in this order:

    choose.py          chooses the screen
    announcing.py      shows what happens before a run has started
    steady.py          keeps a run alive if its screen fails
    changed.py         changes each state before it is shown: adds the name of the run's variable,
                       or wording for a terminal
    notebook.py        one output of a cell: text and HTML that need no kernel; an open page shows
                       the live view instead
    cell_runs.py       several runs of one cell: a table of the finished ones, and one live view
    board.py           the live view: what is sent to a page, and how often
    kept_lines.py      lines of output that a page may request
    page_requests.py   handles requests of a page while the cell runs
    reloaded_pages.py  restores the view in a page that is reloaded during a run
    widget.py          the widget in a page; the only module that uses anywidget
    page/              JavaScript of the page: ES modules, view.js first; and styles of buttons
    terminal.py        output of the ranks as it arrives, and a status below it
    log.py             plain lines only
    lines.py           code that terminal and log share: new lines of output, and writing
"""
