"""Explains failures in words: errors of torch, GPUs and the network, and the collective call at
which ranks diverge.

All modules are pure: texts and records of one run go in, sentences come out. Read in this order:

    failure_kind.py     whether a rank succeeded, failed, or only lost a peer that failed; explains
                        failures of GPUs
    network_errors.py   explains connection errors of gloo, NCCL and torch's store
    detailed_logs.py    reads logs of NCCL and torch under --debug: each host's network, its faults
    calls.py            finds the first collective call at which ranks diverge
"""
