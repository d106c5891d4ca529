"""Scripts that travel in an exported folder, as they are, and run on its nodes without distmagic.

Here: programs of one file, that need nothing but Python, and torch where ranks have it. Never here: an import of
distmagic, except from the zip that lies beside the script.

    run_node.py      is torchrun, and ends when another node has failed
    run_rank.py      runs the user's program as a rank, and has it end well
    run_call.py      makes a pickled call on every rank
"""
