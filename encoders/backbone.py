"""What the LLM's side of a model needs: how to collate for it, which tokens stand for media, what it costs."""

from __future__ import annotations

from typing import Any

from orch.encoders.collate import PackedCollator, PaddedCollator, text_position_ids


def collator_for(model: Any, layout: str) -> PackedCollator | PaddedCollator:
    """The collator of a model's LLM.

    Args:
        model: A transformers model.
        layout: "packed" or "padded".

    Raises:
        ValueError: For another layout.
    """
    positions = _position_ids(model.config)
    if layout == "packed":
        return PackedCollator(positions)
    if layout == "padded":
        text = model.config.get_text_config()
        pad = getattr(text, "pad_token_id", None) or getattr(model.config, "pad_token_id", None) or 0
        return PaddedCollator(pad_token_id=pad, position_ids=positions)
    raise ValueError(f"`layout` must be 'packed' or 'padded', but is {layout!r} instead.")


def placeholder_ids(model: Any, adapter: Any) -> tuple[int, ...]:
    """Token ids that stand for rows of an adapter's encoder, one token a row; () where that is not known."""
    names = getattr(adapter, "placeholders", ())
    found = (getattr(model.config, name, None) for name in names)
    return tuple(token for token in found if token is not None)


def llm_dimensions(model: Any) -> dict[str, int | None]:
    """The sizes of a model's LLM that its cost depends on, as `orch.cost_fit.transformer_flops` names them."""
    text = model.config.get_text_config()
    return {
        "hidden": text.hidden_size,
        "layers": text.num_hidden_layers,
        "intermediate": text.intermediate_size,
        "heads": text.num_attention_heads,
        "kv_heads": getattr(text, "num_key_value_heads", None),
        "head_dim": getattr(text, "head_dim", None),
        "vocab": text.vocab_size,
    }


def _position_ids(config: Any) -> Any:
    if hasattr(config, "position_id_per_seconds"):
        from orch.encoders.mrope import MropePositionIds

        return MropePositionIds.of(config)
    return text_position_ids
