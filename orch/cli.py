"""The command `orch`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from orch import __version__, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="orch", description="Every GPU of a multimodal-LLM training run works.")
    parser.add_argument("--version", action="version", version=f"orch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor.add_arguments(
        commands.add_parser(
            "doctor",
            help="look at versions, launcher, network, nodes and groups",
            description=doctor.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return doctor.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
