"""torchrun without a scheduler: started by hand, or by a system that sets torch's variables.

The package starts no process. Read in this order:

    inside.py   the variables of torchrun, and of other programs that set RANK and WORLD_SIZE  pure
    export.py   torchrun: one command for each host, or one for all                            pure
"""
