"""Make the page of other tools' names: ``python tools/from_others_page.py > docs/reference/from_others.md``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mmrl.config.peer_names import tools


def page() -> str:
    """The page of all names, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Coming from TRL, verl, diffusers, kohya or ai-toolkit"
    yield ""
    yield "The names of these tools' settings in a recipe of mmrl. The message about an unknown key names them, too."
    yield "Values keep their meaning unless the note says otherwise. `python tools/from_others_page.py` makes the page;"
    yield "a test compares the two. A reward function of TRL or verl"
    yield "[runs as it is](../rewards.md#a-reward-of-trl-or-verl)."
    for tool, names in tools().items():
        yield from ("", f"## {tool}")
        for before, after in zip(*(_code(tool, when) for when in ("before", "after")), strict=True):
            yield from ("", before, "", after)
        yield from ("", f"| {tool} | mmrl | note |", "|---|---|---|")
        for name, here in names.items():
            yield f"| `{name}` | {', '.join(f'`{key}`' for key in here.keys) or '-'} | {here.note} |"


def _code(tool: str, when: str) -> list[str]:
    """The code block of a script of ``tool``'s, or of the recipe in its place; none where there is no such example."""
    files = sorted((Path(__file__).parents[1] / "examples" / "from_others").glob(f"{tool.lower()}_{when}.*"))
    fences = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
    return [f"```{fences[file.suffix]}\n{file.read_text()}```" for file in files]


if __name__ == "__main__":
    print(page(), end="")
