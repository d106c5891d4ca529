"""One function with all combinations of some arguments.

`sweep.py` begins the runs side by side over one `Session`, each on devices of its own, and keeps the others in a queue.
Nothing here outlives the kernel, and no run depends on another.
"""
