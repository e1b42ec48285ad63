"""Text that the project writes itself: questions and answers to learn from, and the corpus of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (31, 90, 200),
    "yellow": (240, 200, 20),
    "black": (20, 20, 20),
    "purple": (140, 60, 180),
}
SHAPES = ("circle", "square", "triangle")
PITCHES = {"low": 220.0, "middle": 660.0, "high": 1760.0}
_COMMON_WORDS = (
    "the be to of and a in that have it for not on with he as you do at this but his by from they we say her "
    "she or an will my one all would there their what so up out if about who get which go me when make can "
    "like time no just him know take people into year your good some could them see other than then now look "
    "only come its over think also back after use two how our work first well way even new want because any "
    "these give day most us is are was were been has had picture image recording sound voice question answer "
    "large small long short left right above below light dark number city water world story house family "
    "friend school country state part place case week company system program question government night point "
    "home hand room mother area money fact month lot study book eye job word business issue side kind head "
    "service friend father power hour game line end member law car later however therefore because something "
    "information assistant develop different important example language model training"
)
_CHINESE = ("你好，很高兴见到你。", "这是一张图片。", "这段录音有多长？", "请告诉我你的名字。", "我可以帮助你吗？")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class Shape:
    """One drawn shape: what it is, and its colour's name."""

    kind: str
    colour: str


@dataclass(frozen=True, slots=True)
class Tone:
    """One synthesised tone: its pitch's name, and how long it lasts."""

    pitch: str
    seconds: float


def text_turn(rng: np.random.Generator, num_words: int) -> tuple[str, str]:
    """A question about numbers, and its answer of about `num_words` words: counting, so that length is learnable."""
    first, step = int(rng.integers(1, 20)), int(rng.integers(1, 4))
    count = max(1, num_words)
    numbers = [str(first + step * i) for i in range(count)]
    return f"Count {count} numbers from {first} in steps of {step}.", " ".join(numbers) + "."


def image_turn(pictures: list[list[Shape]]) -> tuple[str, str]:
    """A question about the shapes of each picture, and its answer."""
    descriptions = [
        f"Picture {i}: " + ", ".join(f"a {shape.colour} {shape.kind}" for shape in shapes) + "."
        for i, shapes in enumerate(pictures, 1)
    ]
    return "What is shown?", " ".join(descriptions)


def audio_turn(tones: list[Tone]) -> tuple[str, str]:
    """A question about each recording, and its answer."""
    descriptions = [
        f"Recording {i}: a {tone.pitch} tone of {tone.seconds:.1f} seconds." for i, tone in enumerate(tones, 1)
    ]
    return "What is heard?", " ".join(descriptions)


def corpus(num_lines: int = 400) -> list[str]:
    """The same lines every time: what the generator says, common words, some Chinese."""
    rng = np.random.default_rng(0)
    words = _COMMON_WORDS.split()
    lines = list(_CHINESE)
    for _ in range(num_lines):
        shapes = [Shape(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS)))) for _ in range(3)]
        tones = [Tone(str(rng.choice(list(PITCHES))), float(rng.uniform(0.3, 30.0))) for _ in range(2)]
        turns = (text_turn(rng, int(rng.integers(1, 12))), image_turn([shapes]), audio_turn(tones))
        lines += [line for turn in turns for line in turn]
        lines.append(" ".join(rng.choice(words, size=12)))
    return lines
