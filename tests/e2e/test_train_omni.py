"""The examples, run as a user runs them: through torchrun, their reports read back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FIGURES = {"mean", "max"}
KEYS = {
    "loss",
    "samples_trained",
    "samples_unique",
    "samples_skipped",
    "stages",
    "bytes",
    "plan_ms",
    "wait_ms",
    "step_ms",
    "tokens_per_s",
}
STAGE_KEYS = {
    "imbalance_before",
    "imbalance_after",
    "bound",
    "num_items",
    "largest_batch_before",
    "largest_batch_after",
    "bytes",
}
SMALL = ("--samples", "200", "--max-pixels", "12544", "--token-budget", "256", "--steps", "6", "--lr", "5e-3")


def torchrun(num_ranks, *arguments, script="train_omni.py", limit_s=200):
    """Runs an example; returns the finished process, its output and errors as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(ROOT / "examples" / script), *map(str, arguments)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)


def report_of(folder, num_ranks, *arguments, script="train_omni.py"):
    """The report of a run that must succeed, and what it printed."""
    path = folder / "report.json"
    done = torchrun(num_ranks, *arguments, "--report", path, script=script)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text()), done.stdout + done.stderr


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The report of a run on generated data: 4 ranks on 2 nodes, DDP."""
    return report_of(tmp_path_factory.mktemp("generated"), 4, *SMALL, "--ranks-per-node", 2)


def test_the_loss_falls_on_generated_data(generated):
    report, _ = generated
    assert len(report["loss"]) == 6
    assert report["loss"][-1] < 0.8 * report["loss"][0]
    assert report["samples_trained"] == report["samples_unique"] > 40
    assert report["samples_skipped"] == 0


def test_the_report_has_the_keys_it_promises(generated):
    report, _ = generated
    assert set(report) == KEYS
    assert set(report["stages"]) == {"vision", "audio", "llm"}
    for stage in report["stages"].values():
        assert set(stage) == STAGE_KEYS
        for key in ("imbalance_before", "imbalance_after", "bound"):
            assert set(stage[key]) == FIGURES
            assert 1 <= stage[key]["mean"] <= stage[key]["max"] <= 4
        assert set(stage["bytes"]) == {"intra_node", "inter_node"}
    for key in ("plan_ms", "wait_ms", "step_ms"):
        assert set(report[key]) == FIGURES
    for where in ("intra_node", "inter_node"):
        assert report["bytes"][where] == sum(stage["bytes"][where] for stage in report["stages"].values()) > 0


def test_the_tables_say_what_the_report_says(generated):
    report, printed = generated
    assert f"{report['samples_trained']} samples trained, {report['samples_unique']} of them different" in printed
    assert "0 skipped" in printed
    for name, stage in report["stages"].items():
        (row,) = [line for line in printed.splitlines() if line.startswith(f"│ {name} ")]
        before, after = (f"{stage[key]['mean']:.3f}" for key in ("imbalance_before", "imbalance_after"))
        assert row.index(before) < row.rindex(after)
        assert f"{stage['largest_batch_before']:,} -> {stage['largest_batch_after']:,}" in row
    assert "imbalance" in printed
    assert "tok/s" in printed


def test_the_same_seed_gives_the_same_losses_bit_for_bit():
    def run():
        import train_ddp
        from training import make_parser, train

        options = make_parser("").parse_args([*SMALL, "--steps", "4", "--ranks-per-node", "2"])
        return [train(options, train_ddp.wrap) for _ in range(2)]

    for first, second in run_ranks(run, 4, timeout_s=150):
        assert len(first["loss"]) == 4
        assert first["loss"] == second["loss"]
        assert first["samples_trained"] == second["samples_trained"]


def test_another_launch_with_the_same_seed_gives_the_same_losses_bit_for_bit(generated, tmp_path):
    """By the script of the family, where the first was by the one that chooses."""
    first, _ = generated
    again, _ = report_of(tmp_path, 4, *SMALL, "--ranks-per-node", 2, "--steps", 2, script="train_ddp.py")
    assert len(again["loss"]) == 2
    assert again["loss"] == first["loss"][:2]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_zero2_with_accumulation_and_padding(tmp_path):
    options = ("--accumulate", 2, "--layout", "padded", "--steps", 4)
    report, _ = report_of(tmp_path, 2, *SMALL, *options, script="train_deepspeed.py")
    assert len(report["loss"]) == 4
    assert report["loss"][-1] < report["loss"][0]
    assert report["samples_trained"] == report["samples_unique"] > 0


def test_a_stopped_run_is_resumed(tmp_path):
    """The second run ends the first one's epoch, then trains another; both together are as one run."""

    def run():
        import train_ddp
        from training import make_parser, train

        options = "--samples 30 --max-pixels 12544 --token-budget 192 --num-workers 0 --accumulate 2 --epochs 2"
        parser, folder = make_parser(""), str(tmp_path / "saved")
        runs = [], ["--steps", "2", "--save", folder], ["--resume", folder]
        return [train(parser.parse_args([*options.split(), *more]), train_ddp.wrap) for more in runs]

    for whole, stopped, resumed in run_ranks(run, 2, timeout_s=100):
        assert len(stopped["loss"]) == 2 < len(whole["loss"]) - 2
        assert stopped["loss"] + resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert stopped["samples_trained"] + resumed["samples_trained"] == whole["samples_trained"] == 60


def test_a_resumed_run_that_differs_is_refused_alike_on_all_ranks(tmp_path):
    options, folder = "--samples 30 --max-pixels 12544 --token-budget 192 --num-workers 0", tmp_path / "saved"

    def run(*more):
        import train_ddp
        from training import make_parser, train

        train(make_parser("").parse_args([*options.split(), *more]), train_ddp.wrap)

    run_ranks(run, 2, "--steps", "1", "--save", str(folder), timeout_s=60)
    other = {3: "the number of ranks must be 2, as in the run that was saved, but is 3", 2: "`--lr` must be 0.002"}
    for num_ranks, message in other.items():
        more = ["--resume", str(folder), *(["--lr", "0.1"] if num_ranks == 2 else [])]
        for outcome in run_ranks(run, num_ranks, *more, timeout_s=60, expect_failure=True):
            assert message in outcome.traceback
            assert not outcome.hung


def test_every_record_of_the_demo_is_trained_once_and_balanced(orch_data, tmp_path):
    options = ("--token-budget", 4096, "--ranks-per-node", 2)
    report, _ = report_of(tmp_path, 4, "--data", orch_data / "omni_demo.jsonl", *options)
    assert report["samples_trained"] == report["samples_unique"] == 365
    assert report["samples_skipped"] == 0
    assert report["loss"][-1] < report["loss"][0]
    for name, stage in report["stages"].items():  # of 8 recordings on 4 ranks, the best pairs are 7.5 % uneven
        assert stage["imbalance_after"]["mean"] <= max(1.05, stage["bound"]["mean"]), name
        assert stage["imbalance_after"]["mean"] < stage["imbalance_before"]["mean"], name
        assert stage["largest_batch_after"] <= stage["largest_batch_before"], name
        if name != "llm":  # whose batches the loader has filled to the last token
            assert stage["imbalance_after"]["mean"] < 1 + 0.1 * (stage["imbalance_before"]["mean"] - 1), name


def test_unusable_lines_are_skipped_and_counted(orch_data, tmp_path):
    """Of five rows one can be used."""
    report, printed = report_of(tmp_path, 2, "--data", _hard(orch_data, 13))
    assert report["samples_trained"] == report["samples_unique"] == 1
    assert report["samples_skipped"] == 4
    assert "4 skipped" in printed
    for row in (2, 3, 4, 5):
        assert f"skipped row {row} (sample.jsonl, row {row}): " in printed


def test_a_file_without_a_usable_record_is_reported(orch_data, tmp_path):
    report, printed = report_of(tmp_path, 2, "--data", _hard(orch_data, 14))
    assert report["loss"] == []
    assert (report["samples_trained"], report["samples_skipped"]) == (0, 1)
    assert "skipped h14 (sample.jsonl, row 1): the file" in printed


def test_strict_stops_naming_the_record(orch_data):
    done = torchrun(2, "--data", _hard(orch_data, 14), "--strict")
    assert done.returncode != 0
    assert "h14 (sample.jsonl, row 1) is not: the file" in done.stderr
    assert "Rank 0 failed" in done.stderr


def _hard(orch_data, case):
    (folder,) = (orch_data / "hard").glob(f"{case}_*")
    return folder / "sample.jsonl"


def test_conversations_and_a_limit_of_length(orch_data, tmp_path):
    """Pictures of the collection, where their records say; one record's text is too long and is cut. Under FSDP2."""
    source = orch_data / "real" / "qwen3_vl"
    records = json.loads((source / "single_images.json").read_text())
    turns = [{"from": "human", "value": "Go on."}, {"from": "gpt", "value": "on " * 400}]
    long = {"id": "long", "conversations": turns}
    picture = {**records[0], "id": "large"}
    (tmp_path / "records.json").write_text(json.dumps([*records, long, picture]))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "images").symlink_to(source / "images")
    limits = ("--max-length", 200, "--token-budget", 250, "--max-pixels", 40000, "--epochs", 2)
    report, _ = report_of(tmp_path, 2, "--data", tmp_path / "records.json", *limits, script="train_fsdp2.py")
    assert report["samples_unique"] == len(records) + 2
    assert report["samples_trained"] == 2 * report["samples_unique"]
    assert report["stages"]["vision"]["num_items"] == 2 * (len(records) + 1)
    assert report["stages"]["llm"]["largest_batch_before"] <= 250
