"""A call becomes files that travel."""
