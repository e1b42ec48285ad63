"""Data that the project makes itself: drawn shapes, synthesised tones and text about them, from a seed.

The mix is that of published statistics of three-modality fine-tuning data, at a fifth of its lengths: half of the
samples have pictures, a third recordings, few have many; most texts about media are short, texts alone are long. The
numbers and sizes of pictures and of recordings are drawn independently of each other and of the text. What is asked can
be learnt from what is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from .audio import SAMPLE_RATE, Signal
from .phrases import COLOURS, PITCHES, SHAPES, Shape, Tone, audio_turn, image_turn, text_turn
from .preprocess import Media, Preprocessing, Sample, make_sample
from .records import Turn
from .tokenizer import OmniTokenizer

_MAX_SECONDS = 6.0  # a fifth of the window of a speech encoder, in which long recordings are cut
_MOST_ITEMS = 12


@dataclass(frozen=True, slots=True)
class Mix:
    """What the generated data are like. Sizes are log-normal: a median, and a sigma of their logarithm.

    Attributes:
        num_samples: Of the dataset.
        seed: Of everything.
        image_probability: That a sample has pictures.
        audio_probability: That it has recordings.
        mean_items: Pictures of a sample that has any, and likewise recordings: geometric, few have many.
        median_words: Of the answer of a text alone.
        median_words_beside_media: Of a text beside media, which half of those samples have.
        median_pixels: Of a picture.
        median_seconds: Of a recording.
        text_sigma: Of the text.
        media_sigma: Of pictures and recordings.
    """

    num_samples: int = 2000
    seed: int = 0
    image_probability: float = 0.5
    audio_probability: float = 0.35
    mean_items: float = 1.6
    median_words: float = 100.0
    median_words_beside_media: float = 10.0
    median_pixels: float = 60_000.0
    median_seconds: float = 1.6
    text_sigma: float = 0.8
    media_sigma: float = 1.0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, but is {self.num_samples} instead.")
        for name in ("image_probability", "audio_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be within 0 and 1, but is {getattr(self, name)} instead.")


class GeneratedDataset:
    """A map-style dataset: sample i follows from the seed and i alone, and is made when it is asked for.

    Args:
        tokenizer: For the text.
        preprocessing: Limits and sizes.
        mix: What the samples are like.
    """

    def __init__(self, tokenizer: OmniTokenizer, preprocessing: Preprocessing, mix: Mix | None = None) -> None:
        self._tokenizer = tokenizer
        self._preprocessing = preprocessing
        self._mix = mix or Mix()

    def __len__(self) -> int:
        return self._mix.num_samples

    def __getitem__(self, index: int) -> Sample:
        """The sample; its text is short enough that nothing is cut but where `max_length` is small."""
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must be below {len(self)}, but is {index} instead.")
        rng = np.random.default_rng((self._mix.seed, index))
        turns, media = draw_conversation(rng, self._mix)
        sample = make_sample(turns, media, self._tokenizer, self._preprocessing)
        return sample | {"id": f"generated-{index}", "row": index}


def draw_conversation(rng: np.random.Generator, mix: Mix) -> tuple[list[Turn], Media]:
    """Draws one sample: a turn about each kind of media it has, and one of text."""
    pictures = _draw_pictures(rng, mix) if rng.random() < mix.image_probability else []
    tones = _draw_tones(rng, mix) if rng.random() < mix.audio_probability else []
    pairs = []
    if pictures:
        question, answer = image_turn([shapes for shapes, _ in pictures])
        pairs.append(("<image>" * len(pictures) + question, answer))
    if tones:
        question, answer = audio_turn(tones)
        pairs.append(("<audio>" * len(tones) + question, answer))
    if not pairs or rng.random() < 0.5:
        median = mix.median_words_beside_media if pairs else mix.median_words
        pairs.append(text_turn(rng, int(_log_normal(rng, median, mix.text_sigma, 2, 400))))
    turns = [Turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns, Media([image for _, image in pictures], [synthesise(rng, tone) for tone in tones])


def _log_normal(rng: np.random.Generator, median: float, sigma: float, low: float, high: float) -> float:
    return float(np.clip(median * np.exp(sigma * rng.standard_normal()), low, high))


def _count(rng: np.random.Generator, mean: float) -> int:
    return min(_MOST_ITEMS, int(rng.geometric(1 / mean)))


def _draw_pictures(rng: np.random.Generator, mix: Mix) -> list[tuple[list[Shape], Image.Image]]:
    pictures = []
    for _ in range(_count(rng, mix.mean_items)):
        kinds, colours = rng.choice(SHAPES, 2), rng.choice(list(COLOURS), 2, replace=False)
        shapes = [Shape(str(kind), str(colour)) for kind, colour in zip(kinds, colours, strict=True)]
        pixels = _log_normal(rng, mix.median_pixels, mix.media_sigma, 3200, 1_000_000)
        aspect = float(rng.uniform(0.6, 1.7))
        size = (round((pixels * aspect) ** 0.5), round((pixels / aspect) ** 0.5))
        pictures.append((shapes[: int(rng.integers(1, 3))], size))
    return [(shapes, draw(rng, shapes, size)) for shapes, size in pictures]


def draw(rng: np.random.Generator, shapes: list[Shape], size: tuple[int, int]) -> Image.Image:
    """Draws shapes side by side, left to right, on a light background.

    Args:
        rng: For the background and the sizes.
        shapes: What to draw.
        size: Width and height in pixels.
    """
    image = Image.new("RGB", size, tuple(int(level) for level in rng.integers(215, 256, 3)))
    canvas = ImageDraw.Draw(image)
    column = size[0] / len(shapes)
    for index, shape in enumerate(shapes):
        radius = min(column, size[1]) * float(rng.uniform(0.25, 0.45))
        x, y = column * (index + 0.5), size[1] / 2
        _draw_shape(canvas, shape, x, y, radius)
    return image


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: Shape, x: float, y: float, radius: float) -> None:
    colour = COLOURS[shape.colour]
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape.kind == "circle":
        canvas.ellipse(box, fill=colour)
    elif shape.kind == "square":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)


def _draw_tones(rng: np.random.Generator, mix: Mix) -> list[Tone]:
    return [
        Tone(str(rng.choice(list(PITCHES))), _log_normal(rng, mix.median_seconds, mix.media_sigma, 0.2, _MAX_SECONDS))
        for _ in range(_count(rng, mix.mean_items))
    ]


def synthesise(rng: np.random.Generator, tone: Tone) -> Signal:
    """float32[samples] at 16 kHz: a sine of the tone's pitch, somewhat detuned, with an overtone and noise."""
    time = np.arange(round(tone.seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * PITCHES[tone.pitch] * float(rng.uniform(0.95, 1.05)) * time
    noise = rng.standard_normal(len(time)) * 0.01
    return (0.5 * np.sin(phase) + 0.15 * np.sin(2 * phase) + noise).astype(np.float32)
