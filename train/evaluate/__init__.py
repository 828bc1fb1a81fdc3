"""Every system on the same trace, on simulated machines: `python -m train.evaluate`."""
