"""The tests of distmagic. `lab/` starts real SSH hosts, `browser/` a real JupyterLab, `system/` finds what they need."""
