"""Several generations of one served model that go through its layers together.

Each runs the model's own `generate`, on rows of its own, as a coroutine of one thread. They wait
for one another at every forward pass and at every layer with routed experts, where the union of
what they need is asked for once. So each gives bitwise what it gives alone, whatever runs beside
it, and an expert is read once for all of them (klotski 5; DESIGN 6.4).

Batching rows into one matrix product instead would read dense weights once, but products of
another height round otherwise, and tokens would depend on who else is being served.
"""

from runtime.generation.lockstep.group import Group
from runtime.generation.lockstep.member import Member

__all__ = ["Group", "Member"]
