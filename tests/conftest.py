"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real corpora, vocabularies and reference outputs, too big for the repository."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("ELECTRA_SHARED_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; ELECTRA_SHARED_DATA can name another place")
    return path
