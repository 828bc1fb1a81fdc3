"""Simulated accelerators `sim:0`, `sim:1`: what a GPU forbids, delays and lacks, without a GPU.

A tensor of theirs holds bytes that the host sees only through a copy, and computes with the CPU's
kernels. `backend.simulated` gives PyTorch the devices within a context.

* `memory`: allocations, and the accesses that no event orders (races).
* `streams`: streams whose copies run as late as the events allow, or earlier, by a seed.
* `tensor`: tensors, and each operation on them.
* `backend`: what `torch` and `torch.accelerator` show of the devices.
"""
