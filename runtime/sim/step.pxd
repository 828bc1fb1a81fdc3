import cython


cdef class StepEvent:
    cdef readonly object signal, forecasts
    cdef readonly Py_ssize_t layer, layer_now


cpdef StepEvent answer(StepEvent event, forecasts)
