"""The policy core: what to fetch, what to drop, in which order.

Plain Python over integers and floats: no threads, no torch, no clock of its own. The live runtime
drives it with threads and real reads, the simulator drives the same objects with simulated time.
"""
