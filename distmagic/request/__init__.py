"""What is asked for: hosts, options, the cell. Pure."""
