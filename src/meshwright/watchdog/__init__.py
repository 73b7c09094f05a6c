"""A watchdog over processes that work together: one fails, all end at once and say why.

In: what each process is doing. Out: an exit of all of them, with one line that names the process
at fault. `watchdog` is the context manager a process enters, which wraps the step of its loop; it
starts `monitor`, a thread that exchanges states through JAX's coordination service;
`failure_detector` decides from those states who is at fault, and `preemption` before which step all
save; `os_process` says whether a process lives and where its threads stand, and has the exit
statuses.
"""
