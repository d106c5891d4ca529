"""What Linux tells: processes, sockets, memory, log-out."""
