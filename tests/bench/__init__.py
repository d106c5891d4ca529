"""`make bench`: what distmagic costs, measured in one go against what else there is, as a table with targets.

A section is one module with a `measure(bench)` that returns rows; `__main__` runs them, one after the other, and
writes the table. Everything is measured: ours and theirs in turn, in the same run on the same machine.
"""
