"""SING Cloud: an image and an entry point that become torchrun on every node.

Nothing here asks SING for anything. In this order:

    inside.py    the variables of a node                              pure
    export.py    image, entry point, what each node runs              pure
"""
