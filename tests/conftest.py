from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under pytest-xdist, files of tests that start ranks stay together: at most one such test runs in each worker."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.split("::")[0] if nodeid.startswith(("tests/dist/", "tests/e2e/")) else nodeid

    return ByFolder(config, log)


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
