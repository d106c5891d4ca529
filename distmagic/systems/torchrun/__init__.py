"""torchrun itself, by hand or by a system that sets the variables of torch: no scheduler is asked for anything.

Nothing here starts a process. In this order:

    inside.py    the variables of torchrun, and of others that set RANK and WORLD_SIZE   pure
    export.py    torchrun: one command a host, or one for all                            pure
"""
