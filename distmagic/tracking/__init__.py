"""Passes what ranks report on to an experiment tracker: TensorBoard, Weights & Biases or MLflow.

    RunState  --points.Unsent-->  TrackedPoint, ...  --writers-->  the tracker's own package, on the notebook's machine

Hosts need none of these packages. In this order:

    points.py    which points of a run have come since the last look, pure
    writers.py   one writer for each tracker; the only module that imports their packages
    screen.py    the screen of a run, with a tracker beside it
"""
