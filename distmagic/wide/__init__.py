"""What one call does over many hosts or with many runs, and no cell could say by itself.

Each is a short program over a `Session` or its links; nothing here outlives it.

    spreading.py  files of this machine to all hosts
    sweep.py      one function with all combinations of some arguments: runs side by side, and a queue
"""
