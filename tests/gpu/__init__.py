"""What only a machine with a GPU can show. Elsewhere these tests are skipped, and what they are made of runs on the CPU."""
