"""The system components that tests need: which there are, how to find them, how to install them (`python -m tests.system`)."""
