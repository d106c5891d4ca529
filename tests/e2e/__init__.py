"""Whole runs on real SSH hosts: what a user does, and what is left on the hosts afterwards."""
