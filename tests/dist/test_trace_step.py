"""The example that shows a step's timeline: the ranges of every rank, and a picture."""

import json

import pytest

from tests.ranks import run_ranks

OPTIONS = "--steps 2 --samples 60 --max-pixels 50176 --token-budget 384 --num-workers 0"
PREPARATION = ("orch.gather", "orch.plan", "orch.exchange.raw", "orch.exchange.parcels")


def test_it_writes_a_trace_for_each_rank_and_one_picture(tmp_path):
    pytest.importorskip("matplotlib")

    def run():
        import trace_step

        parser = trace_step.make_parser("")
        parser.add_argument("--out")
        args = parser.parse_args(OPTIONS.split())
        args.out = tmp_path
        trace_step.run(args)

    run_ranks(run, 2, timeout_s=120)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    for balance in ("none", "post"):
        for rank in range(2):
            bars = json.loads((tmp_path / f"{balance}-rank{rank}.bars.json").read_text())
            trace = json.loads((tmp_path / f"{balance}-rank{rank}.json").read_text())
            names = {name for name, *_, in_background in bars if not in_background}
            prepared = {name for name, *_, in_background in bars if in_background}
            assert {"orch.encode.audio", "orch.encode.vision", "orch.merge", "LLM", "backward"} <= names
            assert {"orch.gather", "orch.plan", "orch.exchange.raw"} <= prepared <= {*PREPARATION}
            assert not names & {*PREPARATION}
            (trained_until,) = [start + length for name, start, length, _ in bars if name == "backward"]
            assert all(start < trained_until for _, start, _, in_background in bars if in_background)
            assert (names | prepared) - {"LLM"} <= {event["name"] for event in trace["traceEvents"]}
            assert (balance == "post") == any(name.startswith("orch.exchange.vision") for name in names)
            assert all(length >= 0 for _, _, length, _ in bars)
