from __future__ import annotations

import numpy as np
import pytest
import torch
from omni.generator import GeneratedDataset, Mix, draw, draw_conversation, synthesise
from omni.phrases import COLOURS, PITCHES, Shape, Tone
from omni.preprocess import Preprocessing
from omni.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer()


def dataset(**mix):
    return GeneratedDataset(TOKENIZER, Preprocessing(), Mix(**mix))


@pytest.fixture(scope="module")
def samples():
    generated = dataset(num_samples=150)
    return [generated[index] for index in range(len(generated))]


def test_a_sample_follows_from_seed_and_index_alone():
    for index in (0, 7, 11):
        one, same, other = dataset()[index], dataset(num_samples=50)[index], dataset(seed=1)[index]
        assert one.keys() == same.keys()
        tensors = [key for key in one if isinstance(one[key], torch.Tensor)]
        assert all(torch.equal(one[key], same[key]) for key in tensors)
        assert {"input_ids", "labels"} <= set(tensors)
        assert not torch.equal(one["input_ids"], other["input_ids"])


def test_the_mix_has_many_short_texts_few_long_and_media_that_do_not_follow_each_other(samples):
    text = np.array([int((one["input_ids"] >= 10).sum()) for one in samples])
    patches = np.array([len(one.get("pixel_values", ())) for one in samples])
    frames = np.array([len(one.get("input_features", ())) for one in samples])
    assert text.max() > 8 * np.median(text)
    assert (patches > 0).mean() == pytest.approx(Mix().image_probability, abs=0.1)
    assert (frames > 0).mean() == pytest.approx(Mix().audio_probability, abs=0.1)
    assert abs(np.corrcoef(patches, frames)[0, 1]) < 0.2
    for of_media in (patches, frames):
        assert of_media.max() > 2.5 * np.median(of_media[of_media > 0])
    kinds = {(p > 0, f > 0) for p, f in zip(patches, frames, strict=True)}
    assert len(kinds) == 4, "text alone, either medium, both"


def test_answers_say_what_is_shown_and_heard():
    mix = Mix(image_probability=1.0, audio_probability=1.0)
    for seed in range(20):
        turns, media = draw_conversation(np.random.default_rng(seed), mix)
        assert turns[0].content.count("<image>") == len(media.images) == turns[1].content.count("Picture")
        assert turns[2].content.count("<audio>") == len(media.recordings) == turns[3].content.count("Recording")
        seconds = [float(part.split()[-1]) for part in turns[3].content.split(" seconds")[:-1]]
        assert seconds == pytest.approx([len(sound) / 16000 for sound in media.recordings], abs=0.051)


@pytest.mark.parametrize("kind", ["circle", "square", "triangle"])
def test_a_drawn_shape_has_its_colour(kind):
    image = draw(np.random.default_rng(0), [Shape(kind, "red"), Shape(kind, "blue")], (200, 100))
    assert image.getpixel((50, 50)) == COLOURS["red"]
    assert image.getpixel((150, 50)) == COLOURS["blue"]
    assert min(image.getpixel((1, 1))) > 200


def test_a_tone_has_its_pitch():
    for pitch, hertz in PITCHES.items():
        sound = synthesise(np.random.default_rng(0), Tone(pitch, 1.0))
        assert sound.shape == (16000,)
        assert abs(np.abs(np.fft.rfft(sound)).argmax() - hertz) < 0.06 * hertz


def test_bad_mixes_and_indices_raise():
    with pytest.raises(ValueError, match="`num_samples` must be at least 1"):
        Mix(num_samples=0)
    with pytest.raises(ValueError, match="`image_probability` must be within"):
        Mix(image_probability=1.5)
    with pytest.raises(IndexError, match="`index` must be below 3"):
        dataset(num_samples=3)[3]
