"""Online dynamic batching: batches formed at the DataLoader, where true lengths are known.

    ODBDataLoader          the drop-in DataLoader
    SkipSample             raised by a data set to leave a sample out
    TokenBudget            says when a batch is full
    RankLostError          raised by the loader if another rank is gone
    pop_step_info          takes the `ODBStepInfo` out of a batch
    ODBStepInfo            what the ranks hold in a step, and the loss scale
    scale_loss             scales the loss of a batch to be exact over all ranks
    apply                  makes an existing DataLoader form batches by budget
    apply_v9               the same
    ODBHandle              what it returns
    ODBConfig              the options of a loader in one object
    ODB_STEP_INFO_KEY      the key of a batch under which its `ODBStepInfo` is
    TOTAL_BATCH_SIZE_KEY   the key of the number of samples over all ranks
    LOCAL_BATCH_SIZE_KEY   of samples on this rank
    TOTAL_TOKENS_KEY       of label tokens over all ranks
    LOCAL_TOKENS_KEY       of label tokens on this rank

All are imported when first used (PEP 562), so that grouping alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF_NAME = {
    "ODBDataLoader": "orch.odb.loader",
    "ODBConfig": "orch.odb.compat",
    "ODBHandle": "orch.odb.compat",
    "apply": "orch.odb.compat",
    "apply_v9": "orch.odb.compat",
    "RankLostError": "orch.odb.heartbeat",
    "SkipSample": "orch.odb.errors",
    "TokenBudget": "orch.odb.budget",
    "ODBStepInfo": "orch.odb.step_info",
    "pop_step_info": "orch.odb.step_info",
    "scale_loss": "orch.odb.step_info",
    "TOTAL_BATCH_SIZE_KEY": "orch.odb.step_info",
    "LOCAL_BATCH_SIZE_KEY": "orch.odb.step_info",
    "TOTAL_TOKENS_KEY": "orch.odb.step_info",
    "LOCAL_TOKENS_KEY": "orch.odb.step_info",
    "ODB_STEP_INFO_KEY": "orch.odb.step_info",
}
__all__ = sorted(_HOME_OF_NAME)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'orch.odb' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
