import cython

from runtime.policy.forecast_scheduler cimport ForecastScheduler
from runtime.policy.tier cimport TransferTask
from runtime.transfer.loop cimport TransferLoop
from runtime.transfer.ring cimport Ring


cdef class SimulatedClock:
    cdef public double now


cdef class _RunningTransfer:
    cdef public object ticket
    cdef public double started, end


cdef class SimulatedRing(Ring):
    cdef SimulatedClock _clock
    cdef object _seconds
    cdef Py_ssize_t _num_readers
    cdef double _together, _computing
    cdef bint _is_computing
    cdef list _running
    cdef public Py_ssize_t num_experts
    cdef public double first_end

    cpdef set_computing(self, bint is_computing)
    cpdef load(self, double seconds)
    @cython.locals(now=double)
    cpdef _start(self, ticket, double seconds)
    @cython.locals(first=_RunningTransfer, transfer=_RunningTransfer)
    cpdef _RunningTransfer finish_first(self)
    @cython.locals(running=_RunningTransfer)
    cpdef _stretch(self, double now, double factor)


cdef class _Prediction:
    cdef public double seconds
    cdef public object forecasts
    cdef public Py_ssize_t layer_now


cdef class SimulatedPredictor:
    cdef SimulatedClock _clock
    cdef ForecastScheduler _scheduler
    cdef bint _is_stateless
    cdef public double busy_seconds, first_end
    cdef object _predictions

    cpdef predict(self, double seconds, forecasts, Py_ssize_t layer_now)
    @cython.locals(prediction=_Prediction)
    cpdef _start(self)
    @cython.locals(prediction=_Prediction)
    cpdef finish_first(self)
    @cython.locals(prediction=_Prediction)
    cpdef drop_late(self, layer)


cdef class SimulatedLoop(TransferLoop):
    cdef SimulatedClock _clock
    cdef tuple _rings
    cdef SimulatedPredictor _predictor

    @cython.locals(event=double, ring=SimulatedRing)
    cpdef double next_event(self) except? -1
    @cython.locals(event=double, now=double, ring=SimulatedRing, first=_RunningTransfer)
    cpdef wait(self)
