"""An encoder of one's own: what `orch.stage` has to know of it. Runs on one process, with no argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import orch

IMAGE, NUM_PIXELS, WIDTH = 5, 12, 32
Item = dict[str, torch.Tensor]


class PatchEncoder(nn.Module):
    """Patches [n, pixels] to rows [n, width], each on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_PIXELS, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Encodes."""
        rows: torch.Tensor = self.layers(patches)
        return rows


class PatchAdapter:
    """What orch has to know of `PatchEncoder`. A sample has `patches` [n, pixels], `image_sizes` patches an image."""

    keys = frozenset({"patches", "image_sizes"})
    placeholders = ("image_token_id",)

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """A sample's items, in the order in which the LLM consumes them."""
        sizes = sample.get("image_sizes", torch.zeros(0, dtype=torch.int64))
        return [{"patches": piece} for piece in torch.split(sample["patches"], sizes.tolist())] if len(sizes) else []

    def length(self, item: Item) -> int:
        """Units that enter the encoder: what balance counts."""
        return len(item["patches"])

    def num_rows(self, item: Item) -> int:
        """Rows that leave it."""
        return len(item["patches"])

    def llm_part(self, item: Item) -> Item:
        """What the model's forward needs of an item beside its rows: nothing."""
        return {}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Arguments of the encoder for a batch of items."""
        return {"patches": torch.cat([item["patches"] for item in items])}

    def dummy(self) -> Item:
        """The smallest item: what a rank that has none runs on."""
        return {"patches": torch.zeros(1, NUM_PIXELS)}

    def rows(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that go to the LLM, rows of all items in front."""
        return (output,)

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """Arguments that make the model call its encoder, without the media."""
        return {"patches": torch.zeros(0, NUM_PIXELS)} if parts else {}

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """Which items each of the model's calls of its encoder serves."""
        return [list(range(len(parts)))] if parts else []

    def output(self, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What the encoder would return for these rows."""
        return rows[0]

    def cost(self) -> tuple[float, float, float]:
        """FLOPs of an item, of a unit and of a squared unit."""
        return 0.0, 2.0 * 64 * (NUM_PIXELS + WIDTH), 0.0


class Captioner(nn.Module):
    """An LLM that reads the encoder's rows in place of image tokens. It knows nothing of orch."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
            image_token_id=IMAGE,
        )
        self.encoder = PatchEncoder()
        self.llm = LlamaForCausalLM(self.config)

    def get_input_embeddings(self) -> nn.Module:
        """The LLM's."""
        return self.llm.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, patches: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Encodes patches, if there are any, and runs the LLM."""
        embeds = self.get_input_embeddings()(input_ids)
        if patches is not None:
            embeds = embeds.masked_scatter((input_ids == IMAGE)[..., None], self.encoder(patches))
        return self.llm(inputs_embeds=embeds, **kwargs)


def make_sample(sizes: list[int]) -> dict[str, Any]:
    """A sample with an image for each number of patches."""
    ids = torch.tensor([IMAGE] * sum(sizes) + torch.randint(6, 64, (8,)).tolist())
    media = {"patches": torch.randn(sum(sizes), NUM_PIXELS), "image_sizes": torch.tensor(sizes)}
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)} | (media if sizes else {})


def main() -> None:
    """Trains a few steps."""
    torch.manual_seed(0)
    model = Captioner()
    orch.stage(model.encoder, "vision", PatchAdapter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    groups = [[make_sample([3, 5]), make_sample([]), make_sample([2])]] * 8
    loader = orch.orchestrate(groups, model)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {loader.micro_step.step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
