"""Answers the notebook over one SSH channel, and keeps what is warm."""
