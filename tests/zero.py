"""DeepSpeed without the rest of a training script."""

from typing import Any

import torch
from engines import make_zero_config, prepare_deepspeed
from torch import nn


def wrap_zero(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> Any:
    """A ZeRO-2 engine over the default process group."""
    config = make_zero_config(model, accumulate)
    engine, *_ = prepare_deepspeed().initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine
