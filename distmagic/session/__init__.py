"""One kernel's hosts and jobs: what it keeps between runs, and what it asks of hosts apart from a run."""
