"""The half that travels: runs on the hosts with nothing but Python's standard library (the ranks have torch).

Read wire first, then contact, agent, engine and rank, each of which starts the next; then the others.
"""
