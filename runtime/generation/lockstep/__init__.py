"""Several generations of one served model that go through its layers in lockstep.

Each sequence task runs the model's own `generate` as a coroutine of one thread. The tasks
synchronise at every forward pass and at every layer with routed experts, where the union of the
experts that they need is requested once. Each task therefore produces bitwise what it produces
alone, and each expert is read once for all of them (Klotski, section 5).

Batching the rows into one matrix product would read dense weights once, but products of another
height round differently, so tokens would depend on which other requests are running. With
`exact=shared` single tokens are computed in blocks of four or eight rows instead, of which each has
the same bits.
"""
