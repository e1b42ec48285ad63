"""What a run is refused for before it trains: another run's checkpoint, places that it could not write to."""

from __future__ import annotations

import hashlib
import json
import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from orch.comm.gather import Status, gather_status
from orch.comm.groups import get_rank, get_world_size
from orch.odb.state import RoundRecord
from orch.resume import ResumePoint

OPTIONS_FILE = "options.json"
LASTING_OPTIONS = (
    *("engine", "layout", "token_budget", "accumulate", "samples", "dtype", "max_length", "max_pixels"),
    *("prepend_placeholders", "lr", "seed"),
)
MAX_INTEGER = 2**63 - 1


def at_least(least: int) -> Callable[[str], int]:
    """A type for `ArgumentParser`: integers from `least` on, of 63 bits."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, but is {value} instead")
        if value > MAX_INTEGER:
            raise ArgumentTypeError(f"must be at most {MAX_INTEGER}, but is {value} instead")
        return value

    return integer


def check_run(args: Namespace) -> dict[str, Any]:
    """Looks at what `--data`, `--resume`, `--save` and `--report` name, and makes the folders to write to.

    Every rank calls it.

    Returns:
        What a run that goes on with this one's checkpoint must have in common with it; JSON can hold it.

    Raises:
        RankFailedError: On all ranks alike, if any cannot use one of them.
    """
    options: dict[str, Any] = {}
    try:
        options = _lasting_options(args)
        if args.resume is not None:
            _check_checkpoint(args.resume, options)
        if args.save is not None:
            _prepare_folder("--save", args.save)
        if args.report is not None and get_rank() == 0:
            _prepare_file("--report", args.report)
    except ValueError as error:
        gather_status(Status.FAILED, str(error), label="checks")
    gather_status(Status.OK, label="checks")
    return options


def loader_file(folder: Path) -> Path:
    """Where this rank's loader stood, in a checkpoint."""
    return folder / f"loader-{get_rank()}.json"


def _lasting_options(args: Namespace) -> dict[str, Any]:
    named = {f"--{name.replace('_', '-')}": getattr(args, name) for name in LASTING_OPTIONS}
    return named | {"--data": _told_file(args.data), "the number of ranks": get_world_size()}


def _told_file(path: Path | None) -> str | None:
    """A file of records by its name and content, so that its folder may be moved; not the media that they refer to."""
    if path is None:
        return None
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"`--data` must be a file that can be read, but is not: {error}.") from error
    return f"{path.name} (sha256 {digest.hexdigest()[:16]})"


def _check_checkpoint(folder: Path, options: dict[str, Any]) -> None:
    """A checkpoint goes on with the options, the data and the ranks that it was saved with."""
    saved = _read_json(folder, folder / OPTIONS_FILE)
    if not isinstance(saved, dict) or set(saved) != set(options):
        raise ValueError(f"{folder / OPTIONS_FILE} must hold {sorted(options)}, but holds {saved!s:.80} instead.")
    for name, value in options.items():
        if saved[name] != value:
            words = f"`{name}`" if name.startswith("--") else name
            raise ValueError(
                f"{words} must be {saved[name]!r}, as in the run that was saved, but is {value!r} instead."
            )
    _check_state(loader_file(folder), _read_json(folder, loader_file(folder)))


def _check_state(file: Path, state: Any) -> None:
    try:
        RoundRecord.from_dict(ResumePoint.from_dict(state).loader, {"rank": get_rank(), "num_ranks": get_world_size()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} must be what `--save` wrote for rank {get_rank()}, but is not: {type(error).__name__}: {error}"
        ) from error


def _read_json(folder: Path, file: Path) -> Any:
    if not file.is_file():
        raise ValueError(
            f"`--resume` must be a folder that `--save` wrote, with {OPTIONS_FILE}, a loader-<rank>.json of each rank, "
            f"and the engine's files, but {folder} has no {file.name}."
        )
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} must be what `--save` wrote, but cannot be read: {error}.") from error


def _prepare_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"`{option}` must lie where a folder can be written, but {folder} does not: {error}."
        ) from error


def _prepare_file(option: str, path: Path) -> None:
    _prepare_folder(option, path.parent)
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"`{option}` must be a file that can be written, but {path} cannot.")
