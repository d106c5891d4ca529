"""Notebooks in real kernels on real SSH hosts: what is saved, what fails, what an interrupt and a dead kernel leave."""
