"""Compare the records of two revisions, through the map of renamed keys (``freeze_renames.yaml``).

A record has a section for each of ``SECTIONS``, with values by name; a metric has a value for each step.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmrl.report.nondeterministic_metrics import MEASURED, matches

Record = dict[str, dict[str, Any]]

SECTIONS = {"metrics": "metrics", "heldout": "metrics", "tensors": "tensors", "state": "state", "recipe": "recipe"}
"""Of a record, each with the section of the map that renames its keys."""
ERROR = "error"
"""The section of a record that has no other: why the recipe did not run."""
_PLACEHOLDER = "(measured)"
_WIDTH = 80


class RefusedError(Exception):
    """What the user must change; the message says how."""


@dataclass(frozen=True)
class Rename:
    """``old`` is called ``new``; ``*`` in both stands for any text."""

    section: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.section}: {self.old} -> {self.new}"


class Renames:
    """The entries of the map, in order."""

    def __init__(self, entries: Iterable[Rename] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def read(cls, path: Path) -> Renames:
        """The map in ``path``; empty where there is no such file. Raises ``RefusedError``."""
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except yaml.YAMLError as error:
            raise RefusedError(f"{path} is not YAML: {error}; correct it there") from None
        known = sorted(set(SECTIONS.values()))
        unknown = sorted(str(name) for name in tree if name not in known) if isinstance(tree, dict) else None
        if unknown or not isinstance(tree, dict):
            what = f"a section {unknown[0]!r}" if unknown else "no sections"
            raise RefusedError(f"{path} has {what}; write the sections {', '.join(known)}")
        found = []
        for section, entries in tree.items():
            if not isinstance(entries or {}, dict):
                raise RefusedError(f"{path}, {section}: expected lines `old: new`; for no entries write {{}}")
            for old, new in (entries or {}).items():
                if not (isinstance(old, str) and isinstance(new, str)) or old.count("*") != new.count("*"):
                    raise RefusedError(
                        f"{path}, {section}: the entry {old}: {new} is no renaming; write two names in quotes, with as "
                        "many * in each"
                    )
                found.append(Rename(section, old, new))
        return cls(found)

    def since(self, base: Renames) -> Renames:
        """The entries that ``base`` lacks."""
        return Renames(entry for entry in self.entries if entry not in base.entries)

    def old_name(self, section: str, name: str) -> str:
        """What ``name`` was called before all renamings."""
        for entry in reversed(self.entries):
            if entry.section == section:
                name = renamed(name, entry.new, entry.old) or name
        return name

    def new_name(self, section: str, name: str) -> tuple[str, list[Rename]]:
        """What ``name`` is called after all renamings, and the entries that said so."""
        used = []
        for entry in self.entries:
            if entry.section == section and (found := renamed(name, entry.old, entry.new)) is not None:
                name = found
                used.append(entry)
        return name, used


def renamed(name: str, old: str, new: str) -> str | None:
    """``name`` with the pattern ``new`` in place of ``old``; None where it does not match ``old``."""
    match = re.fullmatch("(.*)".join(map(re.escape, old.split("*"))), name)
    if match is None:
        return None
    ends = [*match.groups(), ""]
    return "".join(part + end for part, end in zip(new.split("*"), ends, strict=True))


@dataclass(frozen=True)
class Difference:
    """The difference of one value; ``base`` or ``new`` is None where that record lacks it."""

    section: str
    name: str
    base: str | None
    new: str | None
    hint: str = ""

    def lines(self) -> list[str]:
        """At most 80 columns wide."""
        head = textwrap.wrap(f"{self.section}  {self.name}", _WIDTH - 2, subsequent_indent="    ")
        base, new = _shortened(self.base, self.new, _WIDTH - 10)
        return [f"  {line}" for line in head] + [f"    base  {base}", f"    new   {new}"] + self._hint()

    def _hint(self) -> list[str]:
        lines = [line for text in self.hint.splitlines() for line in textwrap.wrap(text, _WIDTH - 4)]
        return [f"    {line}" for line in lines]


@dataclass(frozen=True)
class Compared:
    """``differences`` by case, and ``problems`` of the map or the runs themselves."""

    differences: dict[str, list[Difference]]
    problems: list[str]

    @property
    def equal(self) -> bool:
        return not self.problems and not any(self.differences.values())


def compare(base: Mapping[str, Record], new: Mapping[str, Record], renames: Renames, whole: bool = True) -> Compared:
    """Both by case. ``whole``: all cases were run, so that each entry of the map must name something."""
    differences: dict[str, list[Difference]] = {}
    problems: list[str] = []
    used: dict[Rename, bool] = {}
    for case in dict.fromkeys([*base, *new]):
        if case not in base or case not in new:
            there, lacks = ("the new one", "the base") if case in new else ("the base", "the new one")
            problems.append(f"{case}: only {there} has this recipe; {lacks} does not")
            continue
        one, other = base[case], new[case]
        if ERROR in one and ERROR in other:
            problems.append(f"{case}: ran on neither, so nothing is compared: {one[ERROR]['why']}")
            continue
        if ERROR in one or ERROR in other:
            differences[case] = [_failed(one, other)]
            continue
        one, clashes = _in_new_names(one, other, renames, used)
        problems += [f"{case}: {clash}" for clash in clashes]
        differences[case] = differences_of(without_measured(one), without_measured(other))
    for entry in renames.entries if whole else used:
        if entry not in used:
            problems.append(f"tools/freeze_renames.yaml, {entry}: the base has no {entry.old}; correct or remove it")
        elif not used[entry]:
            problems.append(f"tools/freeze_renames.yaml, {entry}: nothing has this new name; correct or remove it")
    return Compared(differences, problems)


def _failed(base: Record, new: Record) -> Difference:
    """That one of them did not run."""
    why = (base if ERROR in base else new)[ERROR]["why"]
    how = {True: "failed", False: "ran"}
    return Difference(ERROR, "one of them did not run", how[ERROR in base], how[ERROR in new], why)


def _in_new_names(record: Record, new: Record, renames: Renames, used: dict[Rename, bool]) -> tuple[Record, list[str]]:
    """``record`` with the names of now, and names that two of its values would get.

    Notes in ``used`` the entries that named something, and whether ``new`` has any of what they call it.
    """
    found: Record = {}
    clashes = []
    for section, values in record.items():
        found[section] = {}
        for name, value in values.items():
            now, entries = renames.new_name(SECTIONS.get(section, section), name)
            if now in found[section]:
                clashes.append(f"{section}: tools/freeze_renames.yaml calls two values {now}; correct the entries")
            found[section][now] = value
            for entry in entries:
                used[entry] = used.get(entry, False) or now in new.get(section, {})
    return found, clashes


def without_measured(record: Record) -> Record:
    """``record`` with a mark in place of each measured value."""
    found: Record = {}
    for section, values in record.items():
        patterns = MEASURED.get(SECTIONS.get(section, section), {})
        found[section] = {
            name: _marked(value) if any(matches(name, p) for p in patterns) else value for name, value in values.items()
        }
    return found


def _marked(value: Any) -> Any:
    return dict.fromkeys(value, _PLACEHOLDER) if isinstance(value, dict) else _PLACEHOLDER


def differences_of(base: Record, new: Record) -> list[Difference]:
    """Each value that is not equal to the bit, or that one record lacks."""
    found = []
    for section in dict.fromkeys([*base, *new]):
        ones, others = (_by_step(record.get(section, {})) for record in (base, new))
        only_new = {name: value for name, value in others.items() if name not in ones}
        for name in dict.fromkeys([*ones, *others]):
            one, other = ones.get(name), others.get(name)
            if one == other:
                continue
            same = [n for n, value in only_new.items() if value == one] if section == "tensors" else []
            hint = f"The same values are called {same[0]} now: an entry of the map?" if len(same) == 1 else ""
            found.append(Difference(section, name, one, other, hint))
    return found


def _by_step(values: Mapping[str, Any]) -> dict[str, str]:
    """Each value as JSON, which says every bit of a float; of a metric, each step's."""
    found = {}
    for name, value in values.items():
        for step, one in value.items() if isinstance(value, dict) and value else [("", value)]:
            found[f"{name}, {step}" if step else name] = json.dumps(one, sort_keys=True)
    return found


def _shortened(base: str | None, new: str | None, width: int) -> tuple[str, str]:
    """Both in ``width`` columns: where they are longer, from a little before the first difference on."""
    one, other = ("(not there)" if text is None else text for text in (base, new))
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - 10) if max(len(one), len(other)) > width and None not in (base, new) else 0
    cut = [("..." if begin else "") + text[begin:] for text in (one, other)]
    short = [text if len(text) <= width else text[: width - 3] + "..." for text in cut]
    return short[0], short[1]
