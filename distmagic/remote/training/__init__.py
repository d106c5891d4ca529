"""Watches torch in a rank: its process groups and its training steps, from inside the user's
process.

The package imports torch only after the user's code has, and sends nothing to the agent. Read in
this order:

    import_hooks.py  changes a library's module when it is imported
    steps.py       counts steps, and makes all ranks stop after the same step
    torch_groups.py  reads torch's groups: their backends, how many calls were made in them
    groups.py      records how process groups were made and used; breaks them and makes them again
    run_store.py   the store in which ranks meet, and its key names
    profiling.py   profiles the next steps
    loading.py     adds up how long a rank loads models
    inventory.py   describes what a rank has under its names
    frames.py      keeps the frames of an exception, with values, for a debugger
    group_sockets.py  finds the connections of a group, so that they can be shut down
"""
