"""What a user types in IPython: `%%distributed`, `%distributed`, and their completion."""
