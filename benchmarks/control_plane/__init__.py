"""Measures what moecast adds to a decode step besides moving experts' bytes: the control plane."""
