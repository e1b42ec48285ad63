"""Every kind of broken or strange data of the handed collection ends as its `case.json` says."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from omni import images
from omni.dataset import OmniDataset
from omni.images import PatchGrid, load_image
from omni.preprocess import Preprocessing
from omni.records import Defect, Record, read_records
from omni.tokenizer import train_tokenizer
from tiny_omni import build_thinker, tiny_thinker_config

from orch.encoders import MropePositionIds, PackedCollator, adapter_for
from orch.odb.errors import SkipSample
from orch.odb.worker import Measuring

TOKENIZER = train_tokenizer()


@pytest.fixture(scope="module")
def thinker():
    model = build_thinker(tiny_thinker_config(TOKENIZER.vocab_size, hidden_size=32, num_layers=2))
    model.model.audio_tower.audio_bos_eos_token.requires_grad_(False)  # takes part in no forward
    return model


@pytest.fixture
def folder(orch_data, request):
    """The folder of the case that the test is named after: `test_04_...` is case 04."""
    (found,) = (orch_data / "hard").glob(f"{request.node.originalname[5:7]}_*")
    return found


def outcomes(folder, preprocessing=None, **options):
    """Each row's sample, or the reason for which it is skipped; an id must stand in every reason."""
    dataset = OmniDataset(folder / "sample.jsonl", TOKENIZER, preprocessing or Preprocessing(), **options)
    found = []
    for index, entry in enumerate(dataset.entries):
        found.append(_sample_or_reason(dataset, index))
        assert isinstance(found[-1], dict) or found[-1].startswith(f"{entry.id} (sample.jsonl, row {entry.row}): ")
    return found


def _sample_or_reason(dataset, index):
    try:
        return dataset[index]
    except SkipSample as skip:
        return skip.reason


def trace(folder):
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def observed(folder):
    return json.loads((folder / "case.json").read_text())["observed"]


def sample_of_lengths(row):
    """A sample with the lengths of a row of a trace; no item for recordings that give no token."""
    frames = [n for n in row["audio_frames"] if n >= 3]
    image_tokens = sum(t * h * w for t, h, w in row["images"]) // 4
    audio_tokens = sum(((n - 1) // 2 - 1) // 2 + 1 for n in frames)
    ids = [11] * row["text_tokens"] + [5] * image_tokens + [9] * audio_tokens
    sample = {"input_ids": torch.tensor(ids, dtype=torch.int64), "labels": torch.tensor(ids, dtype=torch.int64)}
    if row["images"]:
        sample["pixel_values"] = torch.zeros(4 * image_tokens, 588, dtype=torch.uint8)
        sample["image_grid_thw"] = torch.tensor(row["images"])
    if frames:
        sample["input_features"] = torch.zeros(sum(frames), 128)
        sample["audio_feature_lengths"] = torch.tensor(frames)
    return sample


def test_every_case_of_the_index_has_a_test(orch_data):
    cases = [case["case"] for case in json.loads((orch_data / "hard" / "INDEX.json").read_text())]
    tests = [name for name in globals() if name.startswith("test_") and name[5:7].isdigit()]
    assert {case[:2] for case in cases} == {name[5:7] for name in tests}


def test_01_more_placeholders_than_images_is_rejected_by_id(folder):
    (reason,) = outcomes(folder)
    assert "h1" in reason
    assert "2 placeholders <image> for 1 files" in reason


def test_02_images_without_placeholder_are_rejected_or_prepended(folder):
    (reason,) = outcomes(folder)
    assert "0 placeholders <image> for 1 files" in reason
    (sample,) = outcomes(folder, images_without_placeholder="prepend")
    assert (sample["input_ids"] == 5).sum() == sample["image_grid_thw"].prod() // 4
    assert "<|vision_end|>What is shown?" in TOKENIZER.decode(sample["input_ids"].tolist())


def test_04_a_media_block_is_never_cut(folder):
    cutoff, tokens = observed(folder)["cutoff_to_try"], observed(folder)["merged_tokens_at_28px"]
    full = PatchGrid(max_pixels=28 * 28 * tokens)
    (whole,) = outcomes(folder, Preprocessing(grid=full))
    assert (whole["input_ids"] == 5).sum() == tokens
    (reason,) = outcomes(folder, Preprocessing(max_length=cutoff, grid=full))
    assert f"beyond the {cutoff} of `max_length`" in reason
    (downscaled,) = outcomes(folder, Preprocessing(max_length=cutoff))
    assert (downscaled["input_ids"] == 5).sum() == downscaled["image_grid_thw"].prod() // 4 <= 128


def test_06_an_empty_assistant_is_rejected(folder):
    assert all("an assistant turn is empty" in reason for reason in outcomes(folder))


def test_08_a_sample_without_labels_is_rejected_and_never_nan(folder):
    cutoff = observed(folder)["cutoff_to_try"]
    (reason,) = outcomes(folder, Preprocessing(max_length=cutoff))
    assert f"no label is left within the {cutoff} tokens" in reason
    (whole,) = outcomes(folder)
    assert (whole["labels"] != -100).sum() > 0


def test_09_roles_out_of_order_are_rejected_with_the_reason(folder):
    first, second, third = outcomes(folder)
    assert "do not alternate: assistant, user" in first
    assert "do not alternate: user, user, assistant" in second
    assert "the role 'narrator' is unknown" in third


def test_11_identity_is_source_and_row_not_the_id(folder):
    entries = read_records(folder / "sample.jsonl")
    assert [entry.id for entry in entries] == ["dup"] * 3
    assert len({(entry.source, entry.row) for entry in entries}) == 3
    samples = outcomes(folder)
    assert torch.equal(samples[0]["input_ids"], samples[2]["input_ids"])
    assert not torch.equal(samples[0]["input_ids"], samples[1]["input_ids"])
    with pytest.raises(ValueError, match=r"`path` must be a \.json or \.jsonl file"):
        read_records(folder / "dup.tar")


def test_13_broken_lines_are_skipped_by_number(folder):
    entries = read_records(folder / "sample.jsonl")
    assert [type(entry) for entry in entries] == [Record, Defect, Defect, Defect, Defect]
    assert [entry.row for entry in entries] == [1, 2, 3, 4, 5]
    reasons = [entry.reason for entry in entries[1:]]
    for reason, part in zip(reasons, ("empty", "no JSON", "a list, not an object", "NaN"), strict=True):
        assert part in reason
    assert isinstance(outcomes(folder)[0], dict)


def test_14_a_missing_file_is_skipped_or_raises(folder):
    (reason,) = outcomes(folder)
    assert "h14" in reason
    assert "000000185326.jpg does not exist" in reason
    with pytest.raises(ValueError, match=r"h14.*does not exist"):
        outcomes(folder, strict=True)


def test_15_files_that_are_no_pictures_are_rejected_by_id(folder):
    first, second = outcomes(folder)
    assert "h15a" in first
    assert "empty.jpg cannot be decoded" in first
    assert "h15b" in second
    assert "page.jpg cannot be decoded" in second


def test_17_every_mode_becomes_rgb_with_the_right_brightness(folder):
    assert all(isinstance(sample, dict) for sample in outcomes(folder))
    mean = {}
    for path in folder.glob("*.*"):
        if path.suffix in (".png", ".jpg", ".gif", ".tiff"):
            image = load_image(path, 10**6)
            assert (image.mode, image.size) == ("RGB", (60, 40))
            mean[path.name] = np.asarray(image).mean()
    expected = {
        "gray.png": 118.1,
        "la.png": 118.1,
        "bilevel.png": 118.3,
        "rgba.png": 101.0,
        "cmyk.jpg": 101.1,  # not inverted
        "anim.gif": 101.0,  # the first frame is not black
        "gray16.png": 127.5,  # a ramp over the whole range: not clipped to white, as by `convert` (254.4)
        "float.tiff": 127.5,  # likewise, not clipped to black (0.0)
    }
    for name, brightness in expected.items():
        assert mean[name] == pytest.approx(brightness, abs=0.5), name
    assert mean["palette.png"] > 101.5 + 5, "the transparent colour must be laid over white"


def test_19_tiny_images_are_enlarged_to_the_smallest_grid(folder):
    expected = observed(folder)
    entries = read_records(folder / "sample.jsonl")
    for entry, sample in zip(entries, outcomes(folder), strict=True):
        name = entry.media["image"][0].name
        assert sample["image_grid_thw"][0].tolist() == expected[name]["ours"], name
        assert (sample["input_ids"] == 5).sum() == sample["image_grid_thw"].prod() // 4 >= 1


def test_21_bombs_are_rejected_before_they_are_decoded(folder, monkeypatch):
    decoded = []
    load = images.Image.Image.load
    monkeypatch.setattr(images.Image.Image, "load", lambda self: decoded.append(self.size) or load(self))
    monkeypatch.setattr(images, "MAX_DECLARED_PIXELS", 50_000_000)
    bomb, text = outcomes(folder)
    assert "196000000 pixels" in bomb or "declares 14000 x 14000" in bomb
    assert "bigtext.png cannot be decoded (Decompressed" in text
    assert decoded == []
    monkeypatch.setattr(images.Image, "MAX_IMAGE_PIXELS", None)
    assert "it declares 14000 x 14000 pixels, above 50000000" in outcomes(folder)[0]
    assert decoded == []


def test_22_tiny_recordings_are_padded_to_one_token_and_empty_ones_rejected(folder, thinker):
    adapter = adapter_for(thinker.model.audio_tower)
    empty, *padded = outcomes(folder)
    assert "0.wav is empty" in empty
    for sample in padded:
        (item,) = adapter.split(sample)
        assert adapter.length(item) == 3
        assert adapter.num_rows(item) == (sample["input_ids"] == 9).sum() == 1


def test_24_long_recordings_are_split_in_windows_with_matching_counts(folder, thinker):
    adapter = adapter_for(thinker.model.audio_tower)
    for seconds, sample in zip(("31", "95"), outcomes(folder), strict=True):
        items = adapter.split(sample)
        assert [adapter.length(item) for item in items] == observed(folder)[seconds]["windows"]
        assert sum(map(adapter.num_rows, items)) == (sample["input_ids"] == 9).sum()
        assert (sample["input_ids"] == 7).sum() == len(items)


def test_26_short_videos_repeat_their_last_frame_and_broken_ones_are_rejected(folder, thinker):
    adapter = adapter_for(thinker.model.visual)
    cut, *short = outcomes(folder)
    if importlib.util.find_spec("av") is None:
        assert all("h26" in reason and "videos need PyAV" in reason for reason in (cut, *short))
        return
    assert "cut.mp4 cannot be decoded" in cut
    for sample in short:
        (item,) = adapter.split(sample)
        assert sample["video_grid_thw"][0, 0] >= 1
        assert adapter.num_rows(item) == (sample["input_ids"] == 6).sum()


def test_27_a_sample_over_the_budget_keeps_its_length(folder, thinker):
    budget = observed(folder)["budget_to_try"]
    samples = {row["id"]: sample_of_lengths(row) for row in trace(folder)}
    lengths = {name: len(sample["input_ids"]) for name, sample in samples.items()}
    assert [name for name, length in lengths.items() if length > budget] == ["o0", "o1", "o2"]
    adapters = [adapter_for(thinker.model.visual), adapter_for(thinker.model.audio_tower)]
    for name in ("o0", "o1", "o2"):
        parts = {str(i): [list(map(a.llm_part, a.split(samples[name])))] for i, a in enumerate(adapters)}
        collated = PackedCollator(MropePositionIds.of(thinker.config))([samples[name]], parts)
        assert collated["input_ids"].shape == (1, lengths[name])


def test_28_fewer_samples_than_ranks_are_all_distinct(folder):
    ids = [row["id"] for row in trace(folder)]
    assert len(ids) == len(set(ids)) == 5
    assert all(len(sample_of_lengths(row)["input_ids"]) == row["text_tokens"] for row in trace(folder))


def test_29_a_missing_modality_gives_no_item_and_the_dummy_stands_in(folder, thinker):
    adapters = [adapter_for(thinker.model.visual), adapter_for(thinker.model.audio_tower)]
    for index, row in enumerate(trace(folder)):
        sample = sample_of_lengths(row)
        counts = [len(adapter.split(sample)) for adapter in adapters]
        assert counts == [[0, 0], [1, 0], [0, 1]][index % 3]
    towers = (thinker.model.visual, thinker.model.audio_tower)
    for adapter, tower in zip(adapters, towers, strict=True):
        rows = adapter.rows(tower(**adapter.join([adapter.dummy()])))[0]
        (0 * rows.sum()).backward()
        touched = [parameter for parameter in tower.parameters() if parameter.requires_grad]
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in touched)


def test_31_entries_of_zero_cost_are_legal(folder, thinker):
    vision, audio = adapter_for(thinker.model.visual), adapter_for(thinker.model.audio_tower)
    rows = {row["id"]: row for row in trace(folder)}
    for row in rows.values():
        sample = sample_of_lengths(row)
        assert [vision.num_rows(item) for item in vision.split(sample)] == [t * h * w // 4 for t, h, w in row["images"]]
        assert sum(map(audio.num_rows, audio.split(sample))) == (sample["input_ids"] == 9).sum()
    with pytest.raises(SkipSample, match="its length is 0"):
        Measuring().measure(sample_of_lengths(rows["z0"]))
    assert [Measuring().measure(sample_of_lengths(rows[f"z{i}"]))[0] for i in range(1, 5)] == [2, 1, 1, 100]
    for name in ("z2", "z3"):
        # Frames that give no token: refused by the adapter, so that preprocessing must pad them (case 22).
        lengths = torch.tensor(rows[name]["audio_frames"])
        with pytest.raises(ValueError, match="`audio_feature_lengths` must be at least 3"):
            audio.split({"input_features": torch.zeros(int(lengths.sum()), 128), "audio_feature_lengths": lengths})
