"""Attention over packed samples, one segment at a time: no mask over the whole row is ever built.

Under a dense block-diagonal mask one row of packed samples costs the square of the *row*. Here each segment runs
its own causal attention, which costs the sum of the squares of the samples. The boundaries travel with the call, as
`cu_seq_lens_q` (which transformers' layers hand through to the attention function, under gradient checkpointing too),
or follow from position ids that restart.

Registered with transformers as `orch_packed`; `use_packed_attention` switches the LLM of a model to it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

PACKED_ATTENTION = "orch_packed"


def use_packed_attention(model: Any) -> Any:
    """Switches the LLM of a model to packed attention, and its encoders to `sdpa`, which is per segment by itself.

    Args:
        model: A transformers model; one with a `text_config`, or an LLM alone.

    Returns:
        The same model.

    Raises:
        ValueError: If layers of the LLM attend within sliding windows or chunks, which packed attention does not know.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (not getattr(text, "layer_types", None) and getattr(text, "sliding_window", None)):
        raise ValueError(
            f"`model` must have an LLM of full attention, but has {sorted(kinds) or 'a sliding window'} instead: "
            "leave its attention as it is (`sdpa` masks packed samples by their positions)."
        )
    _register()
    if model.config.get_text_config() is model.config:
        model.set_attn_implementation(PACKED_ATTENTION)
        return model
    per_config = {name: "sdpa" for name in model.config.sub_configs if getattr(model.config, name, None) is not None}
    model.set_attn_implementation(per_config | {_text_config_name(model.config): PACKED_ATTENTION})
    return model


def _text_config_name(config: Any) -> str:
    text_config = config.get_text_config()
    return next(name for name in config.sub_configs if getattr(config, name, None) is text_config)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
    AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)


def packed_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask function beside it: None where causal attention per segment or row needs none.

    That is: no cached keys, and no padding or padding on the right alone, which a causal query never sees. Otherwise
    (generation, padding on the left) the mask is the one of `sdpa`.
    """
    from transformers.masking_utils import sdpa_mask

    if kwargs["q_length"] == kwargs["kv_length"] and _is_padded_right(attention_mask):
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return mask


def _is_padded_right(attention_mask: torch.Tensor | None) -> bool:
    if attention_mask is None:
        return True
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment of a row.

    Args:
        module: The attention module (`is_causal`, `num_key_value_groups`).
        query: [1, heads, total, head dim] for a packed row; any batch without boundaries.
        key: [1, key-value heads, total, head dim].
        value: As `key`.
        attention_mask: A mask of transformers' `sdpa` form, with which no segments are formed.
        dropout: Probability.
        scaling: Of the scores.
        **kwargs: `cu_seq_lens_q` int[segments + 1] or `position_ids` int[1, total], and what `sdpa` takes.

    Returns:
        [1, total, heads, head dim], and None for the weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    run = functools.partial(sdpa_attention_forward, module, dropout=dropout, scaling=scaling, **kwargs)
    boundaries = _boundaries(query, key, attention_mask, kwargs)
    if boundaries is None:
        result: tuple[torch.Tensor, None] = run(query, key, value, attention_mask)
        return result
    if query.is_cuda and (varlen := _flash_varlen()) is not None:
        longest = kwargs.get("max_length_q") or int(boundaries.diff().max())
        return _run_varlen(varlen, query, key, value, boundaries, longest, dropout, scaling), None
    lengths = boundaries.diff().tolist()
    pieces = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([run(q, k, v, None)[0] for q, k, v in pieces], dim=1), None


def _boundaries(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """int[segments + 1], or None where the rows are not packed (a mask, cached keys, several rows)."""
    if attention_mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return None
    total = query.shape[2]
    if (boundaries := kwargs.get("cu_seq_lens_q")) is not None:
        if boundaries.device.type == "cpu" and int(boundaries[-1]) != total:  # on a GPU it would wait for the device
            raise ValueError(f"`cu_seq_lens_q` must end at {total} tokens, but ends at {boundaries[-1]} instead.")
        return boundaries
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.shape[-1] != total:
        return None
    starts = torch.nonzero(position_ids.reshape(-1, total)[0].diff() != 1).flatten() + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0), value=0), (0, 1), value=total)


@functools.cache
def _flash_varlen() -> Any:
    """flash-attn's kernel for ragged rows, or None. Not exercised by the tests, which have no GPU."""
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError:
        return None


def _run_varlen(
    varlen: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    offsets = boundaries.to(device=query.device, dtype=torch.int32)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out: torch.Tensor = varlen(
        q, k, v, offsets, offsets, longest, longest, dropout_p=dropout, softmax_scale=scaling, causal=True
    )
    return out[None]
