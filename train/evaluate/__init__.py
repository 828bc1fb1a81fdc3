"""Every system on the same trace, on simulated machines: `moecast evaluate`."""
