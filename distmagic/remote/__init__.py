"""The part of distmagic that runs on hosts.

It needs only Python's standard library (the ranks also have torch).

Read wire first, then contact, agent, engine and rank, each of which starts the next; then the other
packages.
"""
