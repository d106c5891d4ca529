"""Events become the state of a run, and what follows from that state. Pure."""
