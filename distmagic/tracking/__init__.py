"""Sends metrics that ranks report to an experiment tracker: TensorBoard, Weights & Biases or
MLflow.

    RunState           --points.Unsent-->  TrackedPoint, ...
    TrackedPoint, ...  --writers-->        the tracker's own package, on the notebook machine

Hosts do not need these packages. Read in this order:

    points.py    the points of a run that were not sent yet, pure
    writers.py   one writer for each tracker; the only module that imports their packages
    screen.py    a run's screen that also sends metrics to a tracker
"""
