"""A parameter sweep: one function with all combinations of some arguments.

`sweep.py` starts the runs side by side over one `Session`, each on its own devices, and queues the
others. Nothing outlives the kernel, and no run depends on another.
"""
