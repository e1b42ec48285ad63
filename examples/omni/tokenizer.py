"""A byte-level BPE, trained here and now on the project's own text: the same ids every time, any UTF-8 text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tiny_omni import SPECIAL_TOKENS

from .phrases import corpus


@dataclass(frozen=True, slots=True, eq=False)
class OmniTokenizer:
    """Ids of plain text, and of the special tokens, which plain text never yields.

    Attributes:
        bpe: A `tokenizers.Tokenizer`.
    """

    bpe: Any

    @property
    def vocab_size(self) -> int:
        """Special tokens included."""
        return int(self.bpe.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of text; a special token's name in it is text like any other."""
        ids: list[int] = self.bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens included."""
        text: str = self.bpe.decode(ids, skip_special_tokens=False)
        return text

    def special(self, token: str) -> int:
        """The id of a special token.

        Raises:
            ValueError: If it is none.
        """
        if token not in SPECIAL_TOKENS:
            raise ValueError(f"`token` must be one of {SPECIAL_TOKENS}, but is {token!r} instead.")
        return SPECIAL_TOKENS.index(token)


@functools.lru_cache(maxsize=2)
def train_tokenizer(vocab_size: int = 1024) -> OmniTokenizer:
    """Trains on `phrases.corpus`, in about a tenth of a second.

    Args:
        vocab_size: At most; at least 256 bytes and the special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(), trainer)
    bpe.encode_special_tokens = True
    return OmniTokenizer(bpe)
