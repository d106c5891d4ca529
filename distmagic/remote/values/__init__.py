"""Values in files: pickles, tensors, large side files."""
