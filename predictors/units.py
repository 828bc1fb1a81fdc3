"""Binary units of memory, in bytes."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
