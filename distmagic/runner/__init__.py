"""Takes one run from its start to its end, and keeps what is left of it.

All threads of a run are here, but for a workflow of OSMO (systems/osmo/workflow.py). One loop owns a run: on the main thread,
which alone gets interrupts, or on the thread that session/ gives to a run in the background. A thread does one of two
things: it listens to a link, or it does one blocking act. Either ends in an event on the queue while the run is followed;
an act before or after that ends in a future, for which the loop waits. So the state of a run and the table of its nodes
are changed in one place, between two events, where the loop also looks for an interrupt or a button.

    launch.py     two scripts for the run's own thread, from top to bottom: launch a job, attach to one
       |  begins blocking acts, waits for them with the loop
    run_loop.py   the loop: events --fold--> RunState --state/decide--> decisions; questions, interrupts, showing
       |  events                                    |  actions
    node_table.py which node is followed over which link, and what is tried next; no I/O
                                                    |
    executor.py   does what actions.py names, each on a thread, and puts the event with which it ends on event_queue.py

No decision about a run is made on a thread, and nothing here is shown or formatted: the state goes to a `Screen`.
Read launch.py first, then run_loop.py, node_table.py, actions.py and executor.py. The blocking acts are these:

    connect.py       links to all hosts of the run
    prepare.py       asks reached hosts what the plan needs to know, and makes the plan
    start.py         starts every node; where one can't start, those that had started are stopped
    delivery.py      brings the payload to all hosts, large files from host to host
    node_joiner.py   brings a host into an elastic job that runs

Beside them:

    node_row.py      what the table keeps of a node, and of a host that is to join
    interrupts.py    counts Ctrl-C for the loop
"""
