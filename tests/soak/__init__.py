"""A soak: a real server, small models, and a crowd that does everything for minutes or hours.

`python -m tests.soak --minutes 3` (`make soak`). It fails if an outcome is not one of those that
its request may have, if the server's log does not account for every request, if a greedy answer
changes, or if anything is left when all have gone: rows, leases, tasks, threads, descriptors,
bytes.
"""
