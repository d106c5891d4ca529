"""What torch does in a rank: its process groups, watched from within the user's own process.

Never here: torch is not imported before the user's code does so, and nothing is sent to the agent. Read in this order:

    import_hooks.py  changes a library's module when it is imported
    groups.py      whether the rank was in a process group, and used it; keeps a group while a model may use it
"""
