"""Measurements: each script measures det_core and its peers in the same run and prints one table."""
