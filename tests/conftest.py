from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def orch_data() -> Path:
    """The folder of handed data; skips the test where there is none."""
    folder = os.environ.get("ORCH_DATA", "")
    if not folder:
        pytest.skip("the environment variable ORCH_DATA does not name a data folder")
    path = Path(folder).resolve()
    if not path.is_dir():
        pytest.skip(f"the environment variable ORCH_DATA names {folder}, which is no folder")
    return path
