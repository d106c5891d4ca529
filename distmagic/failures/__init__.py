"""What went wrong, in words: errors of torch, GPUs and the network, and the collective call in which ranks part.

Everything here is pure: texts and records of one run go in, sentences come out. In this order:

    failure_kind.py     whether a rank succeeded, failed, or only lost a peer that failed; failures on a GPU, in words
    network_errors.py   connection errors of gloo, NCCL and torch's store, in words
    calls.py            the first collective call in which ranks part
"""
