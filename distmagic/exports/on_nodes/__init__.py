"""Scripts that are copied into an exported folder and run on its nodes without distmagic.

Each is one file, and needs only Python, and torch where ranks have it. None imports distmagic,
except from the zip next to the script.

    run_node.py      runs torchrun, and ends it when another node has failed
    run_rank.py      runs the user's program as a rank, and makes it exit cleanly
    run_call.py      runs a pickled call on every rank
"""
