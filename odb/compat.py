"""Names of `online-dynamic-batching` 0.1.2, so that its scripts run with one changed import.

What differs, and why: `loss_scaling` defaults to "exact" (an unscaled loss averages ranks that hold unequal numbers of
tokens) and weights by label tokens, not input tokens; without a sampler the loader shards the data set over ranks;
`num_workers=0` works; "approx" is exact, since the counts are gathered anyway. `no_warmup`, `no_sync`, `version` and
`group_order_flip` are taken and have no effect: there is no ramp, ranks are always aligned, and the order of groups is
drawn. Without `join` both stop all ranks with the one that runs out; there what that rank still holds is lost, here it
is handed out first. A trainer's quota of samples counts `all_samples_this_step`, in both: the same on all ranks.
`max_patches` is refused: count patches in `length_fn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data._utils.collate import default_collate
from torch.utils.data.dataloader import _InfiniteConstantSampler

from orch.comm.counts import check_count
from orch.odb.loader import ODBDataLoader
from orch.odb.options import NO_EFFECT
from orch.odb.step_info import ODB_STEP_INFO_KEY, resolve_loss_scaling


@dataclass(frozen=True, slots=True)
class ODBConfig:
    """The options of a loader in one object.

    Attributes:
        token_budget: The most tokens of a batch.
        loss_scaling: "exact", "approx" (the same) or "none".
        join: Hand out every sample.
        buffer_size: Samples that a rank groups at a time.
        max_patches: Only 0.
        group_order_flip: No effect; nor have the following.
        no_sync: No effect.
        no_warmup: No effect.
        version: No effect.

    Raises:
        ValueError: If a value makes no sense.
    """

    token_budget: int
    loss_scaling: str | bool | None = "exact"
    join: bool = True
    buffer_size: int | None = None
    max_patches: int = 0
    group_order_flip: str | None = "none"
    no_sync: bool = False
    no_warmup: bool = False
    version: int = 5

    def __post_init__(self) -> None:
        check_count("token_budget", self.token_budget)
        object.__setattr__(self, "loss_scaling", resolve_loss_scaling(self.loss_scaling))

    @property
    def max_input_length(self) -> int:
        """The same as `token_budget`."""
        return self.token_budget

    @property
    def join_mode(self) -> bool:
        """The same as `join`."""
        return self.join


@dataclass(frozen=True, slots=True, eq=False)
class ODBHandle:
    """What `apply` returns.

    Attributes:
        config: The options.
        loader: The loader that iterates in the DataLoader's place.
        step_info_key: The key under which a batch carries its `ODBStepInfo`.
    """

    config: ODBConfig
    loader: ODBDataLoader
    step_info_key: str = ODB_STEP_INFO_KEY

    @property
    def token_budget(self) -> int:
        """The most tokens of a batch."""
        return self.config.token_budget

    @property
    def join(self) -> bool:
        """Whether every sample is handed out."""
        return self.config.join


def _taken_over(kind: type) -> type:
    """A subclass of a DataLoader's class whose iteration its `odb_handle` does."""

    def of_loader(name: str) -> Any:
        return lambda self, *args: getattr(self.odb_handle.loader, name)(*args)

    names = ("__iter__", "__len__", "set_epoch", "state_dict", "load_state_dict")
    return type(f"ODB{kind.__name__}", (kind,), {"__slots__": (), **{name: of_loader(name) for name in names}})


def apply(dataloader: DataLoader[Any], max_input_length: int | None = None, **options: Any) -> ODBHandle:
    """Makes an existing DataLoader yield the batches of an `ODBDataLoader`, in place.

    Its data set, sampler, collate function and workers stay. torch's own sequential and random samplers give way to
    the loader's order, which shards over ranks; any other sampler is kept and must shard by itself.

    Args:
        dataloader: A DataLoader of batch size 1 that has not been iterated.
        max_input_length: The same as `token_budget`.
        **options: Of `ODBDataLoader`.

    Raises:
        ValueError: If the DataLoader has another batch size or a batch sampler of its own, or was given before.
    """
    if hasattr(dataloader, "odb_handle"):
        raise ValueError("`dataloader` must be a DataLoader that ODB was not applied to, but it was.")
    if dataloader.batch_size not in (1, None) or (
        dataloader.batch_size is None and dataloader.batch_sampler is not None
    ):
        raise ValueError(f"`dataloader` must have batch size 1, but has {dataloader.batch_size} instead.")
    loader = ODBDataLoader(
        dataloader.dataset, max_input_length=max_input_length, **{**_arguments_of(dataloader), **options}
    )
    config = ODBConfig(loader.token_budget, loader.loss_scaling, loader.join, options.get("buffer_size"))
    handle = ODBHandle(config, loader)
    dataloader.__class__ = _taken_over(type(dataloader))
    dataloader.odb_handle = handle  # type: ignore[attr-defined]
    return handle


apply_v9 = apply


def _arguments_of(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The keywords with which an `ODBDataLoader` reads as a DataLoader does."""
    names = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "persistent_workers")
    arguments = {name: getattr(dataloader, name) for name in (*names, "prefetch_factor", "pin_memory")}
    if dataloader.collate_fn is not default_collate:
        arguments["collate_fn"] = dataloader.collate_fn
    sampler = dataloader.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        arguments["shuffle"] = True
    elif not isinstance(sampler, (SequentialSampler, _InfiniteConstantSampler)):
        arguments["sampler"] = sampler
    return arguments


assert set(NO_EFFECT) < set(ODBConfig.__dataclass_fields__)
