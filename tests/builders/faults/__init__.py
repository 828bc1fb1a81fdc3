"""Disks that fail, and requests served from them: faults injected below the process under test.

`fusefs` is a FUSE pass-through whose reads can fail, `disk` mounts it, `syscalls` makes strace
change the results of system calls; `host` forks one process for each scenario, under a hard limit.
"""
