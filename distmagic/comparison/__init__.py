"""Compares several runs: a table with one row a run, and one chart a metric with the curves of all
runs.

All modules are pure: states of runs go in, text and HTML come out. A finished run is kept as a
small summary, which holds no reference to the run. Read in this order:

    summary.py    the summary of a run: label, outcome, last and best value of each metric, curves
    arguments.py  the arguments that differ between runs
    as_text.py    the table
    as_html.py    the table and the curves
    metrics.py    the metrics of one run, as rows and as curves
    compare.py    `distmagic.compare`, and the list of a kernel's runs
"""
