import cython

from runtime.policy.device_cache cimport DeviceCache
from runtime.policy.forecast_scheduler cimport ForecastScheduler
from runtime.sim.machine cimport (
    SimulatedClock,
    SimulatedLoop,
    SimulatedPredictor,
    SimulatedRing,
)


cdef class Simulator:
    cdef readonly object hardware, spec
    cdef object _hybrid
    cdef ForecastScheduler _scheduler
    cdef readonly DeviceCache cache
    cdef list _answers
    cdef bint _is_synchronous
    cdef double _step_seconds, _compute_speed_transferring
    cdef SimulatedClock _clock
    cdef SimulatedPredictor _predictor
    cdef readonly SimulatedRing top
    cdef SimulatedRing _bottom
    cdef readonly SimulatedLoop loop
    cdef readonly object layer_seconds, expert_seconds, payoff
    cdef public bint uses_forecasts, predicts_reuse
    cdef readonly double inline_seconds, reuse_seconds

    cpdef forecast(self, forecasts, Py_ssize_t layer_now, double seconds)
    @cython.locals(started=double, left=double, speed=double, end=double, event=double,
                   clock=SimulatedClock, bottom=SimulatedRing, loop=SimulatedLoop)
    cpdef compute(self, double seconds, expert=*)
    @cython.locals(cache=DeviceCache, pending=list, expert=tuple, host_end=double)
    cpdef run_experts(self, Py_ssize_t layer, dict tokens_per_expert, double computed_after=*)
    cpdef list begin_requests(self, Py_ssize_t layer, dict chosen, on_host=*)
