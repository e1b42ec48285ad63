"""What differs between ranks, of whom there may be many, is named in few words."""

import json

import pytest

from orch.comm import alike
from orch.comm.alike import told
from orch.comm.hosts import encode_text


def refusal_of(monkeypatch, all_settings):
    """What `check_alike` says on the first rank and on the last; ranks of the group are numbered from 100."""
    monkeypatch.setattr(alike, "get_global_ranks", lambda group: list(range(100, 100 + len(all_settings))))
    said = []
    for own in (0, -1):

        def gather(words, group, *, label, own=own):
            texts = [encode_text(json.dumps(settings)) for settings in all_settings]
            assert words.tolist() == texts[own].tolist()
            return texts

        monkeypatch.setattr(alike, "gather_ragged", gather)
        with pytest.raises(ValueError, match="must be set up alike") as caught:
            alike.check_alike("`it`", all_settings[own], None, label="choices")
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0].removeprefix("`it` must be set up alike on all ranks, but ").removesuffix(" instead.")


def test_of_many_ranks_and_values_a_few_are_named(monkeypatch):
    settings = [{"`a`": "x" if rank < 2559 else "y", "`b`": f"{rank // 100}", "`c`": "z"} for rank in range(2560)]
    first, second = refusal_of(monkeypatch, settings).split("; ")
    assert first == "`a` is x on ranks [100, 101, 102, 103] and 2555 more and y on rank 2659"
    assert second.startswith("`b` is 0 on ranks [100, 101, 102, 103] and 96 more, 1 on ranks [200, ")
    assert second.endswith(" and 96 more and 22 other values elsewhere")


def test_a_setting_that_not_all_ranks_know_is_named_on_all(monkeypatch):
    """As of other versions: either way round."""
    old, new = {"`a`": "x"}, {"`a`": "x", "`b`": "y"}
    assert refusal_of(monkeypatch, [old, new]) == "`b` is unknown on rank 100 and y on rank 101"
    assert refusal_of(monkeypatch, [new, old]) == "`b` is y on rank 100 and unknown on rank 101"


def test_the_order_of_keys_is_not_told():
    assert told({"a": 1, "b": {"c": 2, 3: 4}}) == told({"b": {3: 4, "c": 2}, "a": 1})
    assert told({"a": 1, "b": 2}) != told({"a": 2, "b": 1})
