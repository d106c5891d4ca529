"""A conversation with one host, over a process that a transport started there."""
