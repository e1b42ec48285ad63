"""Manners under fault: nothing hangs, nobody is left behind, and who is to blame is named."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported by the parent, or every forked rank that wraps a model spends seconds on it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from orch import odb
from orch.odb.heartbeat import RankLostError
from tests.dist.test_odb import Tokens
from tests.ranks import run_ranks

LOST_AFTER_S = 2.0


class Model(torch.nn.Module):
    """A mean loss over label tokens, as language models compute it: NaN without any."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(500, 8).double()
        self.head = torch.nn.Linear(8, 100).double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = self.head(self.embedding(input_ids))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(loader: odb.ODBDataLoader, model: torch.nn.Module, num_epochs: int) -> list[int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples_of_epoch = []
    for _ in range(num_epochs):
        seen = 0
        for batch in loader:
            info = odb.pop_step_info(batch)
            loss = model(**batch) * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += info.num_samples
        samples_of_epoch.append(seen)
    return samples_of_epoch


def test_five_epochs_over_ddp_on_uneven_shards() -> None:
    num_samples = [67, 104, 9]

    def work(grouping: str) -> tuple[list[int], list[float]]:
        rank = dist.get_rank()
        torch.manual_seed(0)
        start = sum(num_samples[:rank])
        loader = odb.ODBDataLoader(
            Tokens(180),
            token_budget=500,
            buffer_size=24,
            grouping=grouping,
            sampler=range(start, start + num_samples[rank]),
            num_workers=1,
            persistent_workers=True,
        )
        model = DistributedDataParallel(Model())
        seen = train(loader, model, 5)
        return seen, [float(p.sum()) for p in model.parameters()]

    ranks = run_ranks(lambda: [work(grouping) for grouping in ("local", "global")], 3, timeout_s=120)
    for results in zip(*ranks, strict=True):
        assert [sum(seen[epoch] for seen, _ in results) for epoch in range(5)] == [180] * 5
        assert results[0][1] == results[1][1] == results[2][1]
        assert not any(value != value for value in results[0][1])


def test_the_first_step_has_the_gradients_of_one_process() -> None:
    def work() -> tuple[list[int], list[list[float]]]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Model())
        loader = odb.ODBDataLoader(Tokens(150), token_budget=500, buffer_size=24, shuffle=True)
        batch = next(iter(loader))
        info = odb.pop_step_info(batch)
        ids = batch["input_ids"][:, 0].tolist()
        (model(**batch) * info.loss_scale).backward()
        return ids, [p.grad.flatten().tolist() for p in model.parameters()]

    results = run_ranks(work, 3)
    torch.manual_seed(0)
    model = Model()
    samples = [Tokens(150)[i] for ids, _ in results for i in ids]
    total = sum(int((sample["labels"] != -100).sum()) for sample in samples)
    for sample in samples:
        share = int((sample["labels"] != -100).sum()) / total
        (model(sample["input_ids"][None], sample["labels"][None]) * share).backward()
    for expected, found in zip(model.parameters(), results[0][1], strict=True):
        assert torch.allclose(expected.grad.flatten(), torch.tensor(found, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_samples", [0, 1, 2])
def test_fewer_samples_than_ranks(num_samples: int) -> None:
    def work() -> list[tuple[int, float]]:
        loader = odb.ODBDataLoader(Tokens(num_samples), token_budget=500, num_workers=1)
        infos = [odb.pop_step_info(batch) for _ in range(2) for batch in loader]
        return [(info.num_samples, float(info.loss_scale)) for info in infos]

    results = run_ranks(work, 3)
    assert {len(result) for result in results} == {2 * min(num_samples, 1)}
    assert sum(count for result in results for count, _ in result) == 2 * num_samples
    assert all((count == 0) == (scale == 0) for result in results for count, scale in result)


def test_without_join_all_stop_together_at_the_quota_of_the_shortest_rank() -> None:
    """The quota of an epoch is what the shortest rank has; a quota over epochs counts what all ranks took."""
    num_samples, quota = [20, 60], 100

    def work() -> tuple[list[list[int]], list[int], int]:
        rank = dist.get_rank()
        start = sum(num_samples[:rank])
        loader = odb.ODBDataLoader(
            Tokens(80),
            token_budget=300,
            buffer_size=10,
            grouping="local",
            join=False,
            sampler=range(start, start + num_samples[rank]),
        )
        epochs, dropped, total, num_steps = [], [], 0, 0
        while total < quota:
            epochs.append([])
            for batch in loader:
                info = odb.pop_step_info(batch)
                epochs[-1].append(info.num_samples)
                total += info.all_samples_this_step
                num_steps += 1
                if total >= quota:
                    break
            else:
                dropped.append(loader.num_dropped)
        loader.close()
        return epochs, dropped, num_steps

    results = run_ranks(work, 2)
    assert results[0][2] == results[1][2]
    assert all(count > 0 for epochs, _, _ in results for counts in epochs for count in counts)
    assert len(results[0][1]) >= 2
    for whole in range(len(results[0][1])):
        assert [sum(results[0][0][whole]), results[0][1][whole]] == [num_samples[0], 0]
        assert sum(results[1][0][whole]) < num_samples[1]
        assert results[1][1][whole] > 0


def test_without_join_global_grouping_drops_less_than_a_step() -> None:
    def work() -> tuple[list[int], int]:
        loader = odb.ODBDataLoader(
            Tokens(70), token_budget=300, buffer_size=16, join=False, sampler=range(dist.get_rank() * 7, 35)
        )
        return [odb.pop_step_info(batch).num_samples for batch in loader], loader.num_dropped

    results = run_ranks(work, 3)
    assert len({len(counts) for counts, _ in results}) == 1
    assert all(count > 0 for counts, _ in results for count in counts)
    assert sum(sum(counts) for counts, _ in results) + sum(left for _, left in results) == 35 + 28 + 21
    assert sum(left for _, left in results) < 3


def test_a_rank_that_is_late_but_alive_is_waited_for() -> None:
    def work() -> int:
        loader = odb.ODBDataLoader(Tokens(200), token_budget=300, buffer_size=16, lost_after_s=LOST_AFTER_S)
        seen = 0
        for step, batch in enumerate(loader):
            seen += odb.pop_step_info(batch).num_samples
            if step == 3 and dist.get_rank() == 1:
                time.sleep(2 * LOST_AFTER_S)
        return seen

    assert sum(run_ranks(work, 2)) == 200


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_rank_is_named(how: signal.Signals) -> None:
    def work() -> None:
        loader = odb.ODBDataLoader(Tokens(3000), token_budget=300, buffer_size=16, lost_after_s=LOST_AFTER_S)
        for step, _ in enumerate(loader):
            if step == 3 and dist.get_rank() == 2:
                os.kill(os.getpid(), how)

    outcomes = run_ranks(work, 3, expect_failure=True, timeout_s=50)
    for outcome in outcomes[:2]:
        assert not outcome.hung
        assert RankLostError.__name__ in outcome.traceback
        assert "rank 2 is" in outcome.traceback or "2]" in outcome.traceback


def run_script(script: str, tmp_path: Path, **popen: Any) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    popen |= {"stdout": subprocess.PIPE, "text": True, "env": env, "preexec_fn": _heed_interrupts}
    return subprocess.Popen([sys.executable, str(path)], **popen)


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores them, and so does all that this starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


ENDLESS = """
    import os, time, torch
    from orch import odb
    from tests.dist.test_odb import Tokens

    class Telling(Tokens):
        def __getitem__(self, index):
            os.write(1, b"worker %d\\n" % os.getpid())
            time.sleep(0.01)
            return super().__getitem__(index % 500)

    if __name__ == "__main__":
        loader = odb.ODBDataLoader(Telling(10**6), token_budget=300, buffer_size=16, num_workers=2)
        for _ in loader:
            pass
"""


def wait_until(holds: Any, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return bool(holds())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_trainer_leaves_no_worker(how: signal.Signals, tmp_path: Path) -> None:
    process = run_script(ENDLESS, tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    workers = {int(process.stdout.readline().split()[1]) for _ in range(60)}
    assert len(workers) == 2
    os.kill(process.pid, how)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode not in (0, None)
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in stderr
    assert wait_until(lambda: not any(map(is_running, workers)), 30)


def test_a_script_that_breaks_off_ends_by_itself(tmp_path: Path) -> None:
    script = """
        from orch import odb
        from tests.dist.test_odb import Tokens

        if __name__ == "__main__":
            loader = odb.ODBDataLoader(Tokens(5000), token_budget=300, buffer_size=16, num_workers=2)
            for step, _ in enumerate(loader):
                if step == 3:
                    break
            print("done", flush=True)
    """
    process = run_script(script, tmp_path)
    stdout, _ = process.communicate(timeout=40)
    assert (process.returncode, stdout) == (0, "done\n")


class Many(Dataset):
    """Two million tiny samples that exist only when read."""

    def __len__(self) -> int:
        return 2_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((8 + index % 24,), index)}


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_memory_of_two_million_samples_is_flat(shuffle: bool) -> None:
    def work() -> tuple[int, int]:
        loader = odb.ODBDataLoader(Many(), token_budget=4096, shuffle=shuffle, num_workers=1)
        used = []
        for step, _ in enumerate(loader):
            if step in (20, 120):
                used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            if step == 120:
                break
        loader.close()
        return used[0], used[1]

    (before, after), *_ = run_ranks(work, 1, timeout_s=120)
    assert after - before < 40 * 1024, "kilobytes"
