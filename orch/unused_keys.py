"""Keys of samples that reach neither a stage nor the model are named, so that nothing is left out in silence."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

# What collators take, check or make anew, and what messages take.
_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "id")


class UnusedKeys:
    """Names each such key once.

    Args:
        of_stages: The keys that stages take.
    """

    def __init__(self, of_stages: Iterable[str]) -> None:
        self._seen = {*_KNOWN, *of_stages}

    def note(self, keys: Iterable[str]) -> None:
        """Warns of those among the keys of a sample that nothing takes, unless it has before."""
        new = sorted(set(keys) - self._seen)
        if new:
            self._seen.update(new)
            warnings.warn(
                f"Keys {new} of samples reach neither a stage nor the batch. Give `orch.orchestrate` a `collate_fn` "
                'that puts them there; numbers and strings are in `batch["orch"].samples`; the encoder of media must '
                "be a stage (`orch.stage`).",
                stacklevel=3,
            )
