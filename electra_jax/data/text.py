"""Moved: `electra_jax.data.opening` reads files, `electra_jax.data.formats` records."""

from electra_jax.data.formats.tfds import records as read_data_set
from electra_jax.data.opening import read_json, read_lines, read_text

__all__ = ["read_data_set", "read_json", "read_lines", "read_text"]
