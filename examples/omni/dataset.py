"""The map-style dataset over a file of records. A row that cannot be used is skipped with its reason, never guessed."""

from __future__ import annotations

from pathlib import Path

from orch.odb.errors import SkipSample

from .audio import load_audio
from .images import load_image
from .preprocess import Media, Preprocessing, Sample, make_sample
from .records import Defect, Record, UnusableRecordError, read_records
from .tokenizer import OmniTokenizer
from .video import load_video


class OmniDataset:
    """Samples of a file of records, one for each row, defective rows included.

    The same row is skipped on whichever rank draws it, since the reason lies in the row alone.

    Args:
        path: A `.json` or `.jsonl` file, see `read_records`.
        tokenizer: For the text.
        preprocessing: Limits and sizes.
        strict: Raise `ValueError` at a row that cannot be used, instead of skipping it.
        images_without_placeholder: `reject` or `prepend`, see `read_records`.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: OmniTokenizer,
        preprocessing: Preprocessing,
        *,
        strict: bool = False,
        images_without_placeholder: str = "reject",
    ) -> None:
        self.entries = read_records(path, images_without_placeholder=images_without_placeholder)
        self._tokenizer = tokenizer
        self._preprocessing = preprocessing
        self._strict = strict

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        """The sample of a row, with its `id` for messages and its index as `row`.

        Raises:
            SkipSample: If the row cannot be used, with its id, place and reason.
            ValueError: Likewise, where `strict`.
        """
        entry = self.entries[index]
        try:
            return self._sample(entry) | {"id": entry.id, "row": index}
        except UnusableRecordError as error:
            place = f"{entry.id} ({Path(entry.source).name}, row {entry.row})"
            if self._strict:
                raise ValueError(f"`records` must all be usable, but {place} is not: {error}.") from error
            raise SkipSample(f"{place}: {error}") from error

    def _sample(self, entry: Record | Defect) -> Sample:
        if isinstance(entry, Defect):
            raise UnusableRecordError(entry.reason)
        grid = self._preprocessing.grid
        media = Media(
            images=[load_image(path, grid.max_pixels) for path in entry.media["image"]],
            recordings=[load_audio(path) for path in entry.media["audio"]],
            videos=[load_video(path, grid) for path in entry.media["video"]],
        )
        return make_sample(entry.turns, media, self._tokenizer, self._preprocessing)
