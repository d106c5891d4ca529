"""What torch does in a rank: its process groups and steps, watched from within the user's own process.

Never here: torch is not imported before the user's code does so, and nothing is sent to the agent. Read in this order:

    import_hooks.py  changes a library's module when it is imported
    steps.py       counts steps, and has ranks stop after the same one
    groups.py      how process groups were made, whether they were used; breaks them, and makes them anew
    run_store.py   where ranks meet, and under which names
    profiling.py   a profile of the next steps
    group_sockets.py  the connections of a group, to be shut down
"""
