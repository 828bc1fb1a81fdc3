"""Faults below the process: output identical, or a clear error for that request; nothing else."""
