cdef class CacheCounters:
    cdef public long long requests, hits, joins, misses, computed_below
    cdef public long long predicted
    cdef public long long needed_predicted, needed_predicted_in_time, needed_predicted_resident
    cdef public long long bytes_moved, bytes_prefetched, bytes_used, bytes_wasted, bytes_late
    cdef public long long evictions
