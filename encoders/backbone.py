"""What the LLM's side of a model needs: how to collate for it, which tokens stand for media, what it costs."""

from __future__ import annotations

from typing import Any

from orch.encoders.collate import PackedCollator, PaddedCollator, text_position_ids

PACKABLE = (
    "gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text",
    "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "smollm3",
)  # fmt: skip
"""Kinds of LLM (`model_type` of the text configuration) whose packed samples were tested not to see each other."""


def collator_for(model: Any, layout: str) -> PackedCollator | PaddedCollator:
    """The collator of a model's LLM.

    Args:
        model: A transformers model.
        layout: "packed" or "padded".

    Raises:
        ValueError: For another layout, for "packed" with an LLM that is not known to keep samples apart, or for an
            LLM with M-RoPE of an unknown kind.
    """
    positions = _position_ids(model.config)
    if layout == "packed":
        _check_packable(model.config.get_text_config().model_type)
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


def _check_packable(kind: str) -> None:
    if kind not in PACKABLE:
        raise ValueError(
            f"`layout` must be 'padded' for an LLM of kind {kind!r}, whose packed samples may see each other "
            f"(those of {', '.join(PACKABLE)} do not), but is 'packed' instead. Who knows better passes a `collate_fn`."
        )


def _position_ids(config: Any) -> Any:
    from orch.encoders.mrope import MROPE_MODELS, MropePositionIds

    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if config.model_type in MROPE_MODELS or "mrope_section" in rope:
        return MropePositionIds.of(config)
    return text_position_ids
