import cython

from runtime.policy.device_cache cimport DeviceCache
from runtime.policy.forecast_scheduler cimport ForecastScheduler
from runtime.policy.tier cimport CacheTier, TransferTask


cdef class Simulator:
    cdef public double now, stall_seconds, predictor_seconds
    cdef object _observer, _overheads, _hybrid, _hardware
    cdef ForecastScheduler _scheduler
    cdef DeviceCache _cache
    cdef bint _is_synchronous, _is_stateless, _is_slowed_by_computing
    cdef double _task_seconds, _compute_speed_transferring, _prediction_end
    cdef tuple _tiers
    cdef list _arrived, _links, _transfer_times
    cdef dict _expert_times
    cdef LinkTransfers _bottom
    cdef object _predictions
    cdef TransferTask _load

    cpdef forecast(self, forecasts, Py_ssize_t layer_now, double seconds)
    @cython.locals(prediction=_Prediction, seconds=double)
    cpdef _start_prediction(self)
    @cython.locals(prediction=_Prediction)
    cpdef _drop_late(self, layer)
    @cython.locals(started=double, left=double, speed=double, end=double, event=double,
                   bottom=LinkTransfers)
    cpdef compute(self, double seconds, expert=*)
    @cython.locals(cache=DeviceCache, pending=list, expert=tuple, host_end=double)
    cpdef run_experts(self, Py_ssize_t layer, dict tokens_per_expert, double computed_after=*)
    cpdef _next_ready(self, Py_ssize_t layer, list pending)
    @cython.locals(top=CacheTier, started=double, arrived=list, expert=tuple)
    cpdef _wait_for_any(self, Py_ssize_t layer, candidates)
    @cython.locals(bottom=LinkTransfers, tier=CacheTier, task=TransferTask, event=double)
    cpdef bint _wait(self) except -1
    @cython.locals(event=double, link=LinkTransfers)
    cpdef double _next_event_time(self) except? -1
    @cython.locals(link=LinkTransfers, prediction=_Prediction, i=Py_ssize_t)
    cpdef bint _handle(self, double event) except -1
    @cython.locals(tier=CacheTier, link=LinkTransfers, task=TransferTask, i=Py_ssize_t)
    cpdef _start_transfers(self)
    @cython.locals(link=LinkTransfers, seconds=double)
    cpdef _start(self, Py_ssize_t i, TransferTask task, bint by_worker)
    @cython.locals(times=dict)
    cpdef double _transfer_seconds(self, Py_ssize_t i, num_bytes) except? -1
    cpdef double _expert_seconds(self, num_tokens) except? -1
    @cython.locals(task=TransferTask, started=double, tier=CacheTier)
    cpdef _finish(self, Py_ssize_t i, _RunningTransfer transfer)


cdef class _Prediction:
    cdef public double seconds
    cdef public object forecasts
    cdef public Py_ssize_t layer_now


cdef class _RunningTransfer:
    cdef public double end, started
    cdef public TransferTask task
    cdef public bint by_worker


cdef class LinkTransfers:
    cdef double _together, _computing
    cdef bint _is_computing
    cdef list _running
    cdef public double first_end
    cdef public bint is_worker_busy

    @cython.locals(running=_RunningTransfer)
    cpdef set_computing(self, double now, bint is_computing)
    @cython.locals(running=_RunningTransfer, end=double)
    cpdef start(self, TransferTask task, double now, double seconds, bint by_worker)
    @cython.locals(first=_RunningTransfer, other=_RunningTransfer)
    cpdef _RunningTransfer finish_first(self)
    @cython.locals(running=_RunningTransfer)
    cpdef _stretch(self, double now, double factor)
