"""Devices: the mesh, which array lies where, and what is sent between them."""
