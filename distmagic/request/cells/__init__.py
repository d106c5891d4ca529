"""Parses a cell: statements for the notebook, and an expression for every rank. Also finds what a
cell does in the notebook alone.

Text goes in, syntax trees and findings come out. The package does not run the cell. Read in this
order:

    cell.py          splits the cell: statements for the notebook, one expression for every rank
    shell_commands.py  rewrites `!ls` as Python that ranks can run
    used_names.py    the names that a cell uses without defining them
    notebook_effects.py  finds statements that only take effect in the notebook, though they were
                     meant for the ranks
    library_changes.py   finds changes of a library, which ranks lack
"""
