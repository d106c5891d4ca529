"""What tests of several rooms build: events and states, plans, hosts that answer by script, jobs on these.

A test module never imports another test module; what two of them need stands here (without hosts), in tests/lab
(hosts), or in tests/e2e/runner.py (jobs on hosts). States as a user meets them are in tests/scenes.py.
"""
