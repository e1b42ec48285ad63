"""A very small three-modality model, samples for it, and the gradients that one process computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import orch
from orch.encoders.backbone import collator_for
from orch.encoders.packing import use_packed_attention
from orch.encoders.registry import adapter_for
from orch.loss import num_label_tokens, token_loss_sum

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tiny_omni import build_thinker, tiny_thinker_config

VOCAB = 64
MEL_BINS = 16


def small_model(dtype=torch.float64, layout="packed", staged=True):
    """A Thinker of two layers; the same weights in every process."""
    config = tiny_thinker_config(VOCAB, hidden_size=32, num_layers=2, num_mel_bins=MEL_BINS)
    model = build_thinker(config, dtype=dtype, seed=3)
    if layout == "packed":
        use_packed_attention(model)
    if staged:
        orch.stage(model.model.visual, "vision")
        orch.stage(model.model.audio_tower, "audio")
    return model


def make_sample(config, seed, num_text=8, grids=(), frames=(), trained=4):
    """A sample with a picture for each (rows, columns) of patches and a recording for each number of mel frames."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, VOCAB, (num_text,), generator=rng).tolist()
    media = []
    for rows, columns in grids:
        media += [config.vision_start_token_id, *[config.image_token_id] * (rows * columns // 4)]
        media += [config.vision_end_token_id]
    for length in frames:
        num_rows = ((length - 1) // 2 + 1 - 2) // 2 + 1
        media += [config.audio_start_token_id, *[config.audio_token_id] * num_rows, config.audio_end_token_id]
    ids = ids[:2] + media + ids[2:]
    labels = [-100] * (len(ids) - trained) + ids[len(ids) - trained :]
    sample = {"id": f"s{seed}", "input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
    if grids:
        sample["image_grid_thw"] = torch.tensor([[1, r, c] for r, c in grids])
        num_patches = sum(r * c for r, c in grids)
        width = 3 * config.vision_config.patch_size**2
        sample["pixel_values"] = torch.randint(0, 255, (num_patches, width), generator=rng, dtype=torch.uint8)
    if frames:
        sample["audio_feature_lengths"] = torch.tensor(frames)
        sample["input_features"] = torch.randn(sum(frames), MEL_BINS, generator=rng)
    return sample


def reference_gradients(samples, dtype=torch.float64):
    """Loss and gradients of one process that runs each sample alone through the plain model: their token mean."""
    model = small_model(dtype, layout="padded", staged=False)
    adapters = {"vision": adapter_for(model.model.visual), "audio": adapter_for(model.model.audio_tower)}
    collate = collator_for(model, "padded")
    total = sum(num_label_tokens(sample["labels"]) for sample in samples)
    mean = 0.0
    for sample in samples:
        loss = _plain_loss_sum(model, adapters, collate, sample) / max(total, 1)
        loss.backward()
        mean += loss.item()
    unused = [f"model.audio_tower.{name}" for name in adapters["audio"].unused]
    trained = {name: p for name, p in model.named_parameters() if name not in unused}
    return mean, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


def _plain_loss_sum(model, adapters, collate, sample):
    items = {name: adapter.split(sample) for name, adapter in adapters.items()}
    parts = {name: [[adapters[name].llm_part(item) for item in of_sample]] for name, of_sample in items.items()}
    batch = collate([sample], parts)
    labels = batch.pop("labels")
    if items["vision"]:
        joined = adapters["vision"].join(items["vision"])
        batch |= {"pixel_values": joined["hidden_states"], "image_grid_thw": joined["grid_thw"]}
    if items["audio"]:
        lengths = [len(item["input_features"]) for item in items["audio"]]
        features = torch.zeros(len(lengths), MEL_BINS, max(lengths), dtype=model.dtype)
        for row, item in zip(features, items["audio"], strict=True):
            row[:, : len(item["input_features"])] = item["input_features"].T.to(model.dtype)
        mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        batch |= {"input_features": features, "feature_attention_mask": mask}
    return token_loss_sum(model(**batch).logits, labels)


def largest_error(
    gradients: Mapping[str, torch.Tensor | None], reference: Mapping[str, torch.Tensor], floor: float = 1e-6
) -> float:
    """The largest error of a parameter's gradient, relative to that parameter's own largest gradient.

    Args:
        gradients: By parameter.
        reference: What they should be.
        floor: A parameter's error is relative to no less than this part of the largest gradient of the model.

    Returns:
        The error; infinite if a gradient is missing, or anything in one is not finite.
    """
    for name, expected in reference.items():
        found = gradients.get(name)
        if found is None or not found.isfinite().all() or not expected.isfinite().all():
            return float("inf")
    largest = {name: expected.abs().max().item() for name, expected in reference.items()}
    least = floor * max(largest.values()) or 1.0
    return max((gradients[name] - reference[name]).abs().max().item() / max(largest[name], least) for name in reference)
