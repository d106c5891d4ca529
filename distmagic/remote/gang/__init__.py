"""Who of the nodes of a job lives, told by heartbeats between hosts."""
