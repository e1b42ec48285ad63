from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omni.audio import load_audio, log_mel, num_frames, windows
from omni.dataset import OmniDataset
from omni.images import PatchGrid, image_patches, load_image, resize, to_rgb, video_patches
from omni.preprocess import Media, Preprocessing, make_sample, num_audio_tokens
from omni.records import Turn, UnusableRecordError
from omni.tokenizer import train_tokenizer
from omni.video import load_video
from PIL import Image
from tiny_omni import SPECIAL_TOKENS, build_thinker, tiny_thinker_config

from orch.encoders import adapter_for
from orch.odb.errors import SkipSample

TOKENIZER = train_tokenizer()
NOISE = np.random.default_rng(0)
sides = st.integers(1, 3000)


@pytest.fixture(scope="module")
def thinker():
    return build_thinker(tiny_thinker_config(TOKENIZER.vocab_size), torch.float64)


def picture(width, height):
    return Image.fromarray(NOISE.integers(0, 256, (height, width, 3), dtype=np.uint8))


def signal(num_samples):
    return (NOISE.standard_normal(num_samples) * 0.1).astype(np.float32)


def span(ids, start, end):
    return [ids[i + 1 : j] for i, j in zip(np.flatnonzero(ids == start), np.flatnonzero(ids == end), strict=True)]


def test_special_tokens_have_the_ids_of_the_configuration(thinker):
    config = thinker.config
    assert config.image_token_id == TOKENIZER.special("<|image_pad|>") == TOKENIZER.bpe.token_to_id("<|image_pad|>")
    assert config.video_token_id == TOKENIZER.special("<|video_pad|>")
    assert config.audio_token_id == TOKENIZER.special("<|audio_pad|>")
    assert config.vision_start_token_id == TOKENIZER.special("<|vision_start|>")
    assert config.audio_start_token_id == TOKENIZER.special("<|audio_start|>")
    with pytest.raises(ValueError, match="`token` must be one of"):
        TOKENIZER.special("<image>")


@given(st.text())
def test_any_text_comes_back_and_never_holds_a_special_token(text):
    for piece in (text, "你好" + text, "<|image_pad|>" + text):
        ids = TOKENIZER.encode(piece)
        assert TOKENIZER.decode(ids) == piece
        assert all(token >= len(SPECIAL_TOKENS) for token in ids)


def test_the_tokenizer_is_the_same_in_another_process():
    program = (
        "import sys; sys.path.insert(0, 'examples'); from omni.tokenizer import train_tokenizer; "
        "print(train_tokenizer().bpe.to_str())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == TOKENIZER.bpe.to_str()
    assert TOKENIZER.vocab_size == 1024


@given(sides, sides, st.sampled_from([3136, 28 * 28 * 16, 28 * 28 * 128]))
def test_resized_sides_fit_the_grid_and_the_limits(height, width, max_pixels):
    grid = PatchGrid(max_pixels=max_pixels)
    h, w = grid.resized(height, width)
    assert h % 28 == w % 28 == 0
    assert 0 < h * w <= max_pixels
    assert h * w >= grid.min_pixels or max_pixels < 4 * grid.min_pixels


@pytest.mark.parametrize("size", [(640, 480), (28, 300), (1000, 900), (90, 71)])
def test_patches_equal_those_of_the_processor(size, thinker):
    from transformers import Qwen2VLImageProcessorPil

    grid = PatchGrid(max_pixels=28 * 28 * 64)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": grid.min_pixels, "longest_edge": grid.max_pixels})
    image = picture(*size)
    expected = processor(images=[image], return_tensors="pt")
    patches, thw = image_patches(resize(image, grid), grid)
    item = {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor([thw])}
    assert list(thw) == expected["image_grid_thw"][0].tolist()
    got = adapter_for(thinker.model.visual).join([item])["hidden_states"]
    torch.testing.assert_close(got.float(), expected["pixel_values"], rtol=0, atol=1e-5)


def test_a_clip_of_equal_frames_has_the_patches_of_its_picture():
    grid = PatchGrid()
    pixels = resize(picture(100, 80), grid)
    single, (_, h, w) = image_patches(pixels, grid)
    double, thw = video_patches(np.stack([pixels] * 4), 2, grid)
    assert thw == (2, h, w)
    columns = double.reshape(2, len(single), 3, 2, 196)
    assert np.array_equal(columns[0, :, :, 0], single.reshape(-1, 3, 196))
    assert np.array_equal(columns[1, :, :, 1], single.reshape(-1, 3, 196))


@pytest.mark.parametrize("seconds", [0.01, 0.4, 3.0, 29.99, 30.0])
@pytest.mark.parametrize("bins", [80, 128])
def test_log_mel_equals_the_extractors(seconds, bins):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=bins)
    sound = windows(signal(int(seconds * 16000)))[0]
    expected = extractor(sound, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
    frames = int(expected["attention_mask"].sum())
    got = log_mel(sound, bins)
    assert got.shape == (frames, bins)
    torch.testing.assert_close(got, expected["input_features"][0, :, :frames].T, rtol=0, atol=2e-3)


def test_long_recordings_split_and_short_ones_are_padded():
    assert [num_frames(len(piece)) for piece in windows(signal(31 * 16000))] == [3000, 100]
    assert [num_frames(len(piece)) for piece in windows(signal(480_001))] == [3000, 3]
    assert [num_frames(len(piece)) for piece in windows(signal(1))] == [3]


@given(st.integers(3, 3000))
def test_audio_tokens_are_counted_as_the_tower_counts(frames):
    tower = build_thinker_once().model.audio_tower
    assert num_audio_tokens(frames) == int(tower._get_feat_extract_output_lengths(torch.tensor(frames))[1]) >= 1


def build_thinker_once(cache=[]):  # noqa: B006
    if not cache:
        cache.append(build_thinker(tiny_thinker_config(64, hidden_size=32, num_layers=2)))
    return cache[0]


def test_grey_levels_are_scaled_not_clipped():
    ramp = np.linspace(0, 1, 64).reshape(8, 8)
    expected = np.rint(ramp * 255)
    sixteen = Image.fromarray((ramp * 65535).astype(np.uint16))
    for image in (sixteen, Image.fromarray(ramp.astype(np.float32)), Image.fromarray((ramp * 255).astype(np.float32))):
        assert np.abs(np.asarray(to_rgb(image)).astype(int) - expected[..., None]).max() <= 1
    stretched = np.asarray(to_rgb(Image.fromarray((ramp * 5 - 2).astype(np.float32))))
    assert (stretched.min(), stretched.max()) == (0, 255)


def test_transparent_pixels_are_white():
    layer = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    layer.putpixel((1, 0), (255, 0, 0, 255))
    assert [to_rgb(layer).getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (255, 0, 0)]


def test_a_jpeg_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(40, 20).save(tmp_path / "a.jpg", exif=exif)
    assert load_image(tmp_path / "a.jpg", 100_000).size == (20, 40)


def test_a_large_jpeg_is_not_decoded_in_full(tmp_path):
    Image.new("RGB", (4000, 3000), "red").save(tmp_path / "a.jpg")
    image = load_image(tmp_path / "a.jpg", 28 * 28 * 16)
    assert image.width * image.height < 4000 * 3000 / 16
    assert PatchGrid().resized(image.height, image.width) == PatchGrid().resized(3000, 4000)


def test_samples_have_placeholders_features_and_labels_that_agree(thinker):
    turns = [
        Turn("system", "s"),
        Turn("user", "<image>一 <audio>b<image>"),
        Turn("assistant", "first <|im_end|>"),
        Turn("user", "again"),
        Turn("assistant", "second"),
    ]
    media = Media([picture(200, 100), picture(30, 30)], [signal(33 * 16000)])
    sample = make_sample(turns, media, TOKENIZER, Preprocessing())
    ids, labels = sample["input_ids"], sample["labels"]
    vision, audio = adapter_for(thinker.model.visual), adapter_for(thinker.model.audio_tower)

    rows = [vision.num_rows(item) for item in vision.split(sample)]
    assert [len(block) for block in span(ids, 3, 4)] == rows
    rows = [audio.num_rows(item) for item in audio.split(sample)]
    assert [len(block) for block in span(ids, 7, 8)] == rows
    assert len(rows) == 2
    trained = TOKENIZER.decode(labels[labels != -100].tolist())
    assert trained == "first <|im_end|><|im_end|>second<|im_end|>"
    assert torch.equal(ids[labels != -100], labels[labels != -100])
    assert sample["pixel_values"].dtype == torch.uint8
    assert TOKENIZER.decode(ids.tolist()).startswith(
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    )


def test_the_end_of_the_text_is_cut_and_never_a_media_block():
    turns = [Turn("user", "<image>x"), Turn("assistant", "word " * 50)]
    media = Media([picture(280, 280)])
    whole = make_sample(turns, media, TOKENIZER, Preprocessing())
    end = int(np.flatnonzero(whole["input_ids"] == 4)[0]) + 1
    first_label = int(np.flatnonzero(whole["labels"] != -100)[0])
    for limit in range(1, first_label + 1):
        reason = "its media end at token" if limit < end else "no label is left"
        with pytest.raises(UnusableRecordError, match=reason):
            make_sample(turns, media, TOKENIZER, Preprocessing(max_length=limit))
    for limit in range(first_label + 1, len(whole["input_ids"]) + 2):
        sample = make_sample(turns, media, TOKENIZER, Preprocessing(max_length=limit))
        assert torch.equal(sample["input_ids"], whole["input_ids"][:limit])
        assert (sample["labels"] != -100).any()


def test_media_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"not a recording")
    for path, reason in ((tmp_path / "a.wav", "cannot be decoded"), (tmp_path / "b.wav", "does not exist")):
        with pytest.raises(UnusableRecordError, match=reason):
            load_audio(path)
    picture(60, 60).save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:2000])
    with pytest.raises(UnusableRecordError, match="cannot be decoded"):
        load_image(tmp_path / "cut.png", 3136)


@pytest.mark.parametrize(("num_samples", "rate"), [(1, 44_100), (1, 48_000), (2, 96_000), (5, 192_000)])
def test_a_recording_that_resampling_leaves_empty_is_rejected(tmp_path, num_samples, rate):
    import soundfile

    soundfile.write(tmp_path / "a.wav", signal(num_samples), rate)
    with pytest.raises(UnusableRecordError, match=rf"is too short \({num_samples} samples at {rate} Hz\)"):
        load_audio(tmp_path / "a.wav")


@pytest.mark.parametrize(("num_samples", "rate"), [(1, 16_000), (1, 8000), (2, 44_100), (2, 48_000), (6, 192_000)])
def test_the_shortest_recordings_give_one_token(tmp_path, num_samples, rate):
    import soundfile

    soundfile.write(tmp_path / "a.wav", signal(num_samples), rate)
    media = Media(recordings=[load_audio(tmp_path / "a.wav")])
    sample = make_sample([Turn("user", "<audio>q"), Turn("assistant", "a")], media, TOKENIZER, Preprocessing())
    assert (sample["input_ids"] == 9).sum() == 1
    assert sample["audio_feature_lengths"].tolist() == [3]
    assert len(sample["input_features"]) == 3


def test_a_placeholder_never_vanishes_with_an_empty_recording():
    turns = [Turn("user", "<audio><audio>q"), Turn("assistant", "a")]
    media = Media(recordings=[signal(16000), signal(0)])
    with pytest.raises(UnusableRecordError, match="a recording has no samples"):
        make_sample(turns, media, TOKENIZER, Preprocessing())


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e30])
def test_a_recording_without_a_finite_spectrum_is_rejected(tmp_path, value):
    import soundfile

    for rate in (16_000, 44_100):
        sound = signal(1000)
        sound[500] = value
        soundfile.write(tmp_path / "a.wav", sound, rate, subtype="FLOAT")
        with pytest.raises(UnusableRecordError, match=r"a\.wav has samples above 1e\+12, or no numbers"):
            load_audio(tmp_path / "a.wav")
    assert log_mel(np.full(16000, 1e12, dtype=np.float32), 80).isfinite().all()


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (1, 20_000), (20_000, 1), (27, 9000), (65_500, 1)])
@pytest.mark.parametrize("max_pixels", [3136, 128 * 28 * 28])
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_pictures_of_any_shape_are_legal_items(tmp_path, size, max_pixels, suffix):
    path = tmp_path / f"a{suffix}"
    Image.new("RGB", size).save(path)
    grid = PatchGrid(max_pixels=max_pixels)
    media = Media([load_image(path, max_pixels)])
    sample = make_sample([Turn("user", "<image>q"), Turn("assistant", "a")], media, TOKENIZER, Preprocessing(grid=grid))
    (thw,) = sample["image_grid_thw"].tolist()
    assert thw[1] % 2 == thw[2] % 2 == 0
    assert 4 <= thw[1] * thw[2] == len(sample["pixel_values"]) <= max_pixels // 14**2
    assert (sample["input_ids"] == 5).sum() == len(sample["pixel_values"]) // 4


def test_a_picture_whose_metadata_are_malformed_is_rejected(tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x0100] = 6, 7
    picture(40, 20).save(tmp_path / "a.jpg", exif=exif)
    number, text = b"\x01\x00\x00\x04", b"\x01\x00\x00\x02"
    content = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content.replace(number, text, 1))
    with pytest.raises(UnusableRecordError, match=r"a\.jpg cannot be decoded"):
        load_image(tmp_path / "a.jpg", 3136)


def test_clips_that_are_malformed_or_change_their_size_are_rejected(tmp_path, orch_data):
    pytest.importorskip("av")
    frames = []
    for size in ((100, 60), (60, 100)):
        picture(*size).save(tmp_path / "a.jpg")
        frames += [(tmp_path / "a.jpg").read_bytes()] * 20
    (tmp_path / "a.mjpeg").write_bytes(b"".join(frames))
    with pytest.raises(UnusableRecordError, match=r"a\.mjpeg changes the size of its frames"):
        load_video(tmp_path / "a.mjpeg", PatchGrid())
    (clip,) = (orch_data / "hard").glob("26_*/three.mp4")
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes().replace(b"VideoHandler", b"\xffideoHandler"))
    with pytest.raises(UnusableRecordError, match=r"a\.mp4 cannot be decoded"):
        load_video(tmp_path / "a.mp4", PatchGrid())


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "", "."])
def test_names_that_no_file_can_have_are_rejected(tmp_path, name):
    pytest.importorskip("av")
    for load in (load_audio, lambda path: load_image(path, 3136), lambda path: load_video(path, PatchGrid())):
        with pytest.raises(UnusableRecordError, match=r"does not exist|cannot be decoded"):
            load(tmp_path / name)


def test_stereo_at_another_rate_becomes_mono_at_16_khz(tmp_path):
    import soundfile

    time = np.arange(44100) / 44100
    tone = 0.4 * np.sin(2 * np.pi * 440 * time)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, np.zeros_like(tone)], axis=1), 44100)
    loaded = load_audio(tmp_path / "a.wav")
    assert loaded.shape == (16000,)
    expected = 0.2 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(loaded[1000:-1000], expected[1000:-1000], atol=2e-3)


def test_the_dataset_skips_with_the_reason_or_stops(tmp_path):
    talk = [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}]
    picture(60, 60).save(tmp_path / "a.png")
    records = [{"id": "x", "messages": talk, "images": ["a.png"]}, {"id": "y", "messages": talk, "images": ["b.png"]}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, records)))
    dataset = OmniDataset(tmp_path / "r.jsonl", TOKENIZER, Preprocessing())
    assert len(dataset) == 2
    assert set(dataset[0]) == {"id", "row", "input_ids", "labels", "pixel_values", "image_grid_thw"}
    assert (dataset[0]["id"], dataset[0]["row"]) == ("x", 0)
    with pytest.raises(SkipSample, match=r"y \(r\.jsonl, row 2\): the file .*b\.png does not exist"):
        dataset[1]
    strict = OmniDataset(tmp_path / "r.jsonl", TOKENIZER, Preprocessing(), strict=True)
    with pytest.raises(ValueError, match=r"`records` must all be usable, but y .*does not exist"):
        strict[1]


def test_bad_records_of_every_kind_are_skipped_by_id_or_row_or_stop(tmp_path):
    import soundfile

    from orch import odb

    soundfile.write(tmp_path / "a.wav", signal(1), 48_000)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    heard = [{"role": "user", "content": "<audio>q"}, talk[1]]
    records = [
        {"id": "good", "messages": talk},
        {"id": "five", "messages": 5},
        {"id": "role", "messages": [{"role": [], "content": "q"}]},
        {"id": "text", "messages": [talk[0], {"role": "assistant", "content": "\ud800"}]},
        {"id": "sound", "messages": heard, "audios": ["a.wav"]},
        {"id": ["list"], "messages": talk},
    ]
    lines = [*map(json.dumps, records), "[" * 100_000]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    dataset = OmniDataset(tmp_path / "r.jsonl", TOKENIZER, Preprocessing())
    names = ["five", "role", "text", "sound", "row 6", "row 7"]
    loader = odb.ODBDataLoader(dataset, token_budget=100)
    assert [sample["id"] for group in loader.groups() for sample in group] == ["good"]
    assert [index for index, _ in loader.skipped] == list(range(1, 7))
    for (index, reason), name in zip(loader.skipped, names, strict=True):
        assert reason.startswith(f"{name} (r.jsonl, row {index + 1}): ")
    strict = OmniDataset(tmp_path / "r.jsonl", TOKENIZER, Preprocessing(), strict=True)
    for index, name in enumerate(names, 1):
        with pytest.raises(ValueError, match=rf"but {name} \(r\.jsonl, row {index + 1}\) is not: "):
            strict[index]


def test_limits_that_make_no_sense_raise():
    with pytest.raises(ValueError, match="`max_length` must be at least 1"):
        Preprocessing(max_length=0)
    with pytest.raises(ValueError, match="`max_pixels` must be at least"):
        PatchGrid(max_pixels=100)


def test_every_demo_record_is_usable(orch_data):
    dataset = OmniDataset(orch_data / "omni_demo.jsonl", TOKENIZER, Preprocessing(), strict=True)
    assert len(dataset) == 365
    thinker = build_thinker_once()
    audio = adapter_for(thinker.model.audio_tower)
    for index in range(len(dataset)):
        sample = dataset[index]
        ids, grid = sample["input_ids"], sample.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert (ids == 5).sum() == grid.prod(1).sum() // 4
        assert (ids == 9).sum() == sum(audio.num_rows(item) for item in audio.split(sample))
        assert (sample["labels"] != -100).any()
