"""The token-exact loss under engines that take means.

An engine divides gradients by the world size W, and some by the number K of accumulation steps. The loss of a
micro-step is therefore its *sum* of token losses times `W / T` or `W * K / T`, where T counts the label tokens of the
whole step over all ranks and micro-steps. The gradient is then the mean over all T tokens, as one process computes it.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F  # noqa: N812

IGNORE = -100


def num_label_tokens(labels: torch.Tensor) -> int:
    """Tokens of one sample (int64[L]) that are trained on; the first label has no token before it to predict it."""
    return int((labels[1:] != IGNORE).sum())


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies over all label tokens.

    Args:
        logits: [n, L, V]; those of position i predict token i + 1.
        labels: int64[n, L], -100 where nothing is trained.

    Returns:
        A scalar in float32, or float64 for float64 logits; 0 with a gradient of zeros if no label is trained.
    """
    targets = labels[:, 1:]
    trained = targets != IGNORE
    chosen = logits[:, :-1][trained]
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    return F.cross_entropy(chosen, targets[trained].long(), reduction="sum")


def loss_scale(num_tokens: int, world_size: int, accumulation_divisor: int) -> float:
    """Factor of a micro-step's summed loss.

    Args:
        num_tokens: T, label tokens of the step over all ranks and micro-steps.
        world_size: W, by which the engine divides.
        accumulation_divisor: By what the engine divides for accumulation: K for DeepSpeed's `backward`, 1 for DDP.

    Returns:
        `W * divisor / T`; 0 for a step without a label token, with one warning.
    """
    if num_tokens == 0:
        warnings.warn("A step holds no label token: its loss counts as 0.", stacklevel=2)
        return 0.0
    return world_size * accumulation_divisor / num_tokens
