from runtime.policy.tier cimport TransferTask


cdef class Ring:
    cdef public dict errors

    cpdef bint has_room(self) except -1
    cpdef submit(self, ticket, TransferTask task)
    cpdef bint cancel(self, ticket) except -1
    cpdef poll(self)
    cpdef bint settle(self, ticket, status) except -1
