"""Views of a running server: metrics, the status page, traces, recorded requests."""
