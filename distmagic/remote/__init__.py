"""The half that travels: runs on the hosts with nothing but Python's standard library (the ranks have torch)."""
