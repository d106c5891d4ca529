"""Takes one run from its start to its end, and keeps its outcome.

This package starts all threads of a run, except those of an OSMO workflow
(systems/osmo/workflow.py). One loop owns a run. It runs on the main thread, which receives Ctrl-C,
or for a background run on a thread of session/. Every other thread either reads from a link or
performs one blocking action. While the run is followed, both end with an event on the queue. An
action before or after that ends with a future, for which the loop waits. So only the loop changes
the state of a run and the table of its nodes, one event at a time. It also checks for interrupts
and buttons.

    launch.py     two procedures for the run's own thread: launch a job, attach to one
       |  starts blocking actions, waits for them with the loop
    run_loop.py   the loop: events --fold--> RunState --state/decide--> decisions; questions,
       |          interrupts, showing
       |  events                                    |  actions
    node_table.py the link of each node, and what to try next; no I/O
                                                    |
    executor.py   performs the actions of actions.py, each on a thread, and puts the resulting
                  event on event_queue.py

Only the loop takes decisions about a run, and a `Screen` shows its state. Read launch.py first,
then run_loop.py, node_table.py, actions.py and executor.py. The blocking actions are:

    connect.py       links to all hosts of the run
    prepare.py       asks the connected hosts for facts, and makes the plan
    start.py         starts every node; if one fails to start, stops the others
    delivery.py      sends the payload to all hosts; large files go from host to host
    node_joiner.py   adds a host to a running elastic job

The rest:

    node_row.py      the table's rows: one node, or one host that will join
    interrupts.py    counts Ctrl-C for the loop
"""
