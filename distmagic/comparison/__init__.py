"""Puts several runs side by side: a row a run, and their curves over each other.

Everything here is pure: states of runs go in, text and HTML come out. No run is changed, asked or shown here; what is
kept of a run that is over is small, and refers to nothing of it. In this order:

    summary.py    what is kept of a run: its label, how it ended, the last and the best value of each metric, its curves
    arguments.py  the arguments in which runs differ
    as_text.py    the table
    as_html.py    the table and the curves
    metrics.py    what ranks have reported, as rows and as curves
    compare.py    `distmagic.compare`, and the list of a kernel's runs
"""
