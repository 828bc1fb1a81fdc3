"""The policy core: what to fetch, what to evict, in which order.

Plain Python over integers and floats: no threads, no torch, no clock. The live runtime runs it with
threads and real reads, the simulator runs the same objects with simulated time.
"""

from runtime.compiled import extend_path

__path__ = extend_path(__path__, __name__)
