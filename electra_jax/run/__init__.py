"""A run on its machines: its directory, its processes, its signals."""
