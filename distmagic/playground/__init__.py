"""Throw-away SSH hosts on this machine."""
