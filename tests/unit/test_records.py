from __future__ import annotations

import json

import pytest
from omni.records import Defect, Record, Turn, read_records

TALK = [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}]
GOOD = {"messages": TALK, "images": ["a"]}


def write(tmp_path, *records, name="records.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def reasons(entries):
    return [entry.reason if isinstance(entry, Defect) else "" for entry in entries]


def test_both_forms_and_both_kinds_of_file_give_the_same_records(tmp_path):
    messages = {"id": 7, "messages": TALK, "images": ["a/b.png"]}
    llava = {
        "id": 7,
        "image": "a/b.png",
        "conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}],
    }
    for record in (messages, llava, {**llava, "images": ["a/b.png"]}):
        (lines,) = read_records(write(tmp_path, record))
        (listed,) = read_records(write(tmp_path, json.dumps([record]), name="records.json"))
        assert isinstance(lines, Record)
        assert isinstance(listed, Record)
        assert lines.turns == listed.turns == (Turn("user", "<image>q"), Turn("assistant", "a"))
        assert lines.media["image"] == (tmp_path / "a/b.png",)
        assert lines.media["audio"] == lines.media["video"] == ()
        assert (lines.id, lines.row, listed.row) == ("7", 1, 1)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("[1]", "it is a list, not an object"),
        ("3", "it is a int"),
        ("{", "the line is no JSON"),
        ("  ", "the line is empty"),
        ('{"messages": [], "x": NaN}', "NaN is no JSON number"),
        ({"text": "x"}, "neither `messages` nor `conversations`"),
        ({"messages": None}, "do not alternate: no turn"),
        ({"messages": ["x"]}, "a message has no text under `content`"),
        ({"messages": [{"role": "user", "content": None}]}, "a message has no text under `content`"),
        ({"messages": TALK}, "1 placeholders <image> for 0 files"),
        ({"messages": TALK, "images": ["a", "b"]}, "1 placeholders <image> for 2 files"),
        ({"messages": TALK, "images": [3]}, "`images` is not a list of paths"),
        ({"messages": 5}, "`messages` is a int, not a list"),
        ({"messages": {}}, "`messages` is a dict, not a list"),
        ({"messages": "talk"}, "`messages` is a str, not a list"),
        ({"conversations": True}, "`conversations` is a bool, not a list"),
        ({"messages": [["user", "q"]]}, "a message has no text under `content`"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, "has no text under `content`"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "a message has no text under `role`"),
        ({"messages": [{"role": {"name": "user"}, "content": "q"}]}, "a message has no text under `role`"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, "a message has no text under `from`"),
        ({"conversations": [{"from": "human", "value": 3}]}, "a message has no text under `value`"),
        ({"messages": [{"content": "q"}]}, "a message has no text under `role`"),
        ({**GOOD, "images": 5}, "`images` is not a list of paths"),
        ({**GOOD, "audios": {"path": "a.wav"}}, "`audios` is not a list of paths"),
        ({**GOOD, "audios": {}}, "`audios` is not a list of paths"),
        ({**GOOD, "videos": False}, "`videos` is not a list of paths"),
        ({**GOOD, "images": [["a"]]}, "`images` is not a list of paths"),
        ({**GOOD, "id": ["x"]}, "its `id` is a list, not text or a number"),
        ({**GOOD, "id": {"x": 1}}, "its `id` is a dict, not text or a number"),
        ({**GOOD, "id": True}, "its `id` is a bool, not text or a number"),
        ({**GOOD, "id": "\ud800"}, "its `id` is no text in UTF-8"),
        ({**GOOD, "images": ["\ud800.png"]}, "a path in `images` is no text in UTF-8"),
        ({"messages": [TALK[0], {**TALK[1], "content": "a\udfff"}]}, "a message's `content` is no text in UTF-8"),
        ({"conversations": [{"from": "human", "value": "\ud800"}]}, "a message's `value` is no text in UTF-8"),
        ({"messages": [{"role": "\ud800", "content": "q"}]}, r"the role '\ud800' is unknown"),
        pytest.param('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "the line is nested too deeply", id="deep"),
        pytest.param("[" * 100_000, "the line is nested too deeply", id="deep and cut"),
        pytest.param('{"id": ' + "9" * 5000 + "}", "the line is no JSON", id="many digits"),
        ({"messages": TALK[:1], "images": ["a"]}, "do not alternate: user"),
        ({"messages": [*TALK, {"role": "system", "content": ""}], "images": ["a"]}, "do not alternate"),
        ({"messages": [*TALK, *TALK[:1]], "images": ["a"]}, "do not alternate"),
    ],
)
def test_a_defect_keeps_the_rest_and_says_why(tmp_path, record, reason):
    entries = read_records(write(tmp_path, GOOD, record, GOOD))
    assert [entry.row for entry in entries] == [1, 2, 3]
    assert isinstance(entries[0], Record)
    assert isinstance(entries[2], Record)
    assert reason in reasons(entries)[1]
    assert all(text.encode() for text in (entries[1].id, entries[1].reason))


def test_what_is_null_is_absent_and_pairs_of_surrogates_are_text(tmp_path):
    path = write(tmp_path, {**GOOD, "id": None, "audios": None, "videos": ""}, {**GOOD, "id": "\U0001f600"})
    assert "\\ud83d\\ude00" in path.read_text()
    first, second = read_records(path)
    assert (first.id, second.id) == ("row 1", "\U0001f600")
    assert first.media["audio"] == first.media["video"] == ()


def test_a_system_turn_may_come_first_and_many_turns_follow(tmp_path):
    turns = [{"role": "system", "content": "s"}, *TALK, {"role": "user", "content": "r"}, TALK[1]]
    (entry,) = read_records(write(tmp_path, {"messages": turns, "images": "a.png"}))
    assert [turn.role for turn in entry.turns] == ["system", "user", "assistant", "user", "assistant"]


def test_placeholders_are_prepended_on_request(tmp_path):
    silent = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path, {"messages": silent, "images": ["a", "b"], "audios": ["c"]})
    assert reasons(read_records(path)) == ["it has 0 placeholders <image> for 2 files"]
    (entry,) = read_records(path, images_without_placeholder="prepend")
    assert entry.turns[0].content == "<image><image><audio>q"
    partly = write(tmp_path, {"messages": TALK, "images": ["a", "b"]})
    assert "1 placeholders" in reasons(read_records(partly, images_without_placeholder="prepend"))[0]


def test_files_and_options_that_cannot_be_read_raise(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must be a \.json or \.jsonl file"):
        read_records(tmp_path / "a.tar")
    with pytest.raises(ValueError, match="`path` must hold a list"):
        read_records(write(tmp_path, "{}", name="a.json"))
    with pytest.raises(ValueError, match=r"`path` must hold a list of records, but .* is nested too deeply"):
        read_records(write(tmp_path, "[" * 100_000 + "]" * 100_000, name="a.json"))
    with pytest.raises(ValueError, match="`images_without_placeholder` must be"):
        read_records(write(tmp_path, {}), images_without_placeholder="guess")
