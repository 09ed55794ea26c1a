"""Train the embedding of a graph for the reward ``knowledge``.

    python -m mmrl.studies.knowledge --example towns.tsv                     # writes a generated graph to try
    python -m mmrl.studies.knowledge towns.tsv --out knowledge/towns         # trains NOTE on it
    python -m mmrl.studies.knowledge towns.tsv --out knowledge/rotate --kind rotate --steps 4000

A line of the graph is a head, a relation and a tail, with tabs between them. A part of the triples (``--held``) is kept
back: half of it chooses the smoothing and calibrates, and the other half gives the figures that are printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.logging.progress import Progress
from mmrl.rewards.learned.knowledge import graph
from mmrl.rewards.learned.knowledge.embeddings import KINDS
from mmrl.studies.knowledge.towns import towns
from mmrl.studies.knowledge.training import Settings, train, write


def _settings(given: argparse.Namespace) -> Settings:
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    for name in ("size", "group", "steps", "batch", "negatives"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name} {getattr(settings, name)}: give 1 or more")
    if not 0 < settings.held < 1:
        raise UserError(f"--held {settings.held:g}: give a share above 0 and below 1")
    return settings


def main(words: list[str] | None = None) -> None:
    """Run the command line. Exits with 2 and a message where something is to be mended."""
    parser = argparse.ArgumentParser(
        "python -m mmrl.studies.knowledge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, help="a new folder for the embedding")
    parser.add_argument("--example", type=Path, metavar="FILE", help="write a generated graph, and train nothing")
    for field in fields(Settings):
        default = getattr(Settings, field.name)
        choices = KINDS if field.name == "kind" else None
        parser.add_argument(f"--{field.name}", type=type(default), default=default, choices=choices, help=f"{default}")
    given = parser.parse_args(words)
    try:
        _run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _run(given: argparse.Namespace) -> None:
    if given.example is not None:
        if given.example.exists():
            raise UserError(f"--example {given.example}: it exists; name another file")
        given.example.write_text("".join("\t".join(row) + "\n" for row in towns(seed=given.seed)), encoding="utf-8")
        print(
            f"{given.example}: a generated graph; train with: "
            f"python -m mmrl.studies.knowledge {given.example} --out FOLDER"
        )
        return
    if given.graph is None or given.out is None:
        raise UserError("name a graph and --out FOLDER, or --example FILE for a graph to try")
    if given.out.exists():
        raise UserError(f"--out {given.out}: it exists; name a new folder")
    settings, known = _settings(given), graph.read(given.graph)
    print(f"{len(known.entities)} entities, {len(known.relations)} relations, {len(known.triples)} triples")
    with Progress(settings.steps, "train", "steps") as progress:
        trained = train(known, settings, lambda step: progress.advance())
    write(given.out, trained, settings, known)
    for name, value in trained.figures.items():
        print(f"{name}: {value:.3f}" if name != "kept_back" else f"kept back, and used for nothing else: {value:.0f}")
    print(f"wrote {given.out}; use it as rewards: [{{name: knowledge, options: {{path: {given.out}, ...}}}}]")


if __name__ == "__main__":
    main()
