"""``lightning-3d trace merge``: the traces of all ranks in one file and on one clock."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_3d.errors import ConfigError
from lightning_3d.monitor.trace_merge import merge

_EPILOG = """examples:
  lightning-3d trace merge lightning_logs/version_0 -o merged.json       (open it at https://ui.perfetto.dev)
  lightning-3d trace merge traces -o merged.json.gz"""


def main(args: list[str]) -> int:
    """Run the command with the arguments after its name and return the exit code.

    Raises:
        ConfigError: The folder holds no trace, or the file to write has an ending that is not known.
    """
    parser = argparse.ArgumentParser(
        "lightning-3d trace",
        description="Work on traces: of torch's profiler (Trainer(profiler='pytorch')) and timelines of ThreeDMonitor.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    merging = commands.add_parser(
        "merge",
        help="put the traces of all ranks into one file and on one clock",
        description="Put the traces of all ranks into one file and on one clock. Ranks become processes, named by"
        " their place on the mesh. What the clocks of hosts are apart was measured when the run began.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    merging.add_argument("folder", type=Path, metavar="DIR", help="log folder of the run, or any folder with traces")
    merging.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".json, or .json.gz")
    given = parser.parse_args(args)
    if not given.output.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--output {given.output}: the name must end in .json or .json.gz.")
    merged = merge(given.folder, given.output)
    for path, why in merged.skipped.items():
        print(f"left out {path}: {why}", file=sys.stderr)
    ranks = ", ".join(map(str, sorted(merged.ranks)))
    clocks = "" if merged.corrected else "; clocks of hosts as they are: the run has no record of ThreeDMonitor"
    print(
        f"{given.output}: {merged.events:,} events of rank{'s' if len(merged.ranks) > 1 else ''} {ranks} over"
        f" {merged.seconds:.3f} s{clocks}. Open it at https://ui.perfetto.dev"
    )
    return 0
