"""Systems side by side on this machine: what an arm is, how it is run, and what came out."""
