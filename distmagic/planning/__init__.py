"""From the facts of hosts to what each of them is told to start. Pure."""
