"""SING Cloud: an image and an entry point that runs torchrun on every node.

The package does not contact SING. Read in this order:

    inside.py    the variables of a node                                 pure
    export.py    the image, its entry point, and what each node runs     pure
"""
