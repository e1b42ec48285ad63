"""The very small models of every family as stages, samples for them, and what one process computes with them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import orch
from orch.encoders.packing import use_packed_attention
from orch.encoders.registry import adapter_for
from orch.loss import num_label_tokens, token_loss_sum
from tests.families import FAMILIES, VOCAB
from tests.omni import largest_error

__all__ = ["FAMILIES"]


@functools.cache
def plain_model(name: str) -> Any:
    """The model in fp64, one for each process; what takes part in no forward is frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = FAMILIES[name].build()
    for parameter in model.parameters():  # not buffers: the frequencies of the rotary embeddings stay float32
        parameter.data = parameter.data.double()
        if not parameter.data.any():
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(5))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()


@functools.cache
def unused_parameters(name: str) -> frozenset[str]:
    """Names of parameters that a sample with all media gives no gradient."""
    model = plain_model(name)
    kinds = list(FAMILIES[name].media)
    plain_loss_sum(name, make_sample(name, 0, kinds)).backward()
    unused = frozenset(key for key, parameter in model.named_parameters() if parameter.grad is None)
    model.zero_grad()
    return unused


def make_model(name: str, layout: str, packed_attention: bool = True) -> Any:
    """A copy of the plain model with its encoders as stages."""
    unused = unused_parameters(name)
    model = copy.deepcopy(plain_model(name))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and key not in unused)
    if layout == "packed" and packed_attention:
        use_packed_attention(getattr(model, "llm", model))
    for stage, path in FAMILIES[name].towers.items():
        orch.stage(model.get_submodule(path), stage)
    return model


def make_sample(name: str, seed: int, kinds: list[str] | tuple[str, ...] = (), num_text: int = 8) -> dict[str, Any]:
    """A sample with an item of each of `kinds`, in order of the kinds of the family, of sizes that follow from seed."""
    model, media, rng = plain_model(name), FAMILIES[name].media, torch.Generator().manual_seed(seed)
    ids = torch.randint(12, VOCAB, (num_text,), generator=rng).tolist()
    found = [media[kind](model, rng, (seed + i) % 3) for i, kind in enumerate(sorted_kinds(name, kinds))]
    tokens = ids[:2] + [token for item, _ in found for token in (*item, 30)] + ids[2:]
    tensors: dict[str, list[torch.Tensor]] = {}
    for _, item in found:
        for key, value in item.items():
            tensors.setdefault(key, []).append(value)
    labels = [-100] * (len(tokens) - 4) + tokens[-4:]
    sample = {"id": f"s{seed}", "input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)}
    return sample | {key: torch.cat(values) for key, values in tensors.items()}


def sorted_kinds(name: str, kinds: list[str] | tuple[str, ...]) -> list[str]:
    return sorted((kind for kind in kinds if kind in FAMILIES[name].media), key=list(FAMILIES[name].media).index)


def plain_logits(name: str, sample: dict[str, Any]) -> torch.Tensor:
    """[L, VOCAB]: of one sample, alone, through the plain model and its own positions."""
    inputs = FAMILIES[name].plain({key: value for key, value in sample.items() if key not in ("id", "labels")})
    ids = inputs.pop("input_ids")[None]
    inputs = {k: v.double() if v.is_floating_point() and v.ndim > 1 else v for k, v in inputs.items()}
    output = plain_model(name)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs)
    logits: torch.Tensor = output.logits[0]
    return logits


def plain_loss_sum(name: str, sample: dict[str, Any]) -> torch.Tensor:
    """Its summed token loss."""
    return token_loss_sum(plain_logits(name, sample)[None], sample["labels"][None])


def reference(name: str, samples: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean token loss and gradients of one process that runs each sample alone through the plain model."""
    unused, model, mean = unused_parameters(name), plain_model(name), 0.0
    model.zero_grad()
    total = sum(num_label_tokens(sample["labels"]) for sample in samples)
    for sample in samples:
        loss = plain_loss_sum(name, sample) / total
        loss.backward()
        mean += loss.item()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad and key not in unused}
    return mean, {key: torch.zeros_like(p) if p.grad is None else p.grad.clone() for key, p in trained.items()}


def worst_error(gradients: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest error of a parameter's gradient relative to that parameter's largest; infinite if there is none."""
    return largest_error(gradients, expected)


def count_entries(model: Any, name: str) -> dict[str, int]:
    """Counts from here on how often each encoder itself runs, and the projector if there is one."""
    entered = dict.fromkeys(FAMILIES[name].towers, 0)

    def count(key: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        entered[key] += 1
        return run(*args, **kwargs)

    for stage, path in FAMILIES[name].towers.items():
        tower = model.get_submodule(path)
        tower.forward = functools.partial(count, stage, tower.forward)
    for path, module in model.named_modules():
        if path.endswith("projector"):
            entered["projector"] = 0
            module.forward = functools.partial(count, "projector", module.forward)
    return entered


class Groups:
    """A loader of given groups."""

    def __init__(self, groups: list[list[dict[str, Any]]]) -> None:
        self._groups = groups

    def groups(self) -> Any:
        return iter(self._groups)


def bound_adapter(name: str, stage: str) -> Any:
    """The adapter of a tower, told its model's configuration."""
    model = plain_model(name)
    adapter = adapter_for(model.get_submodule(FAMILIES[name].towers[stage]))
    return adapter.bind(model.config) if hasattr(adapter, "bind") else adapter
