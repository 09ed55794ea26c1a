"""Make the page of other tools' names: ``python tools/from_others_page.py > docs/from_others.md``."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.peer_names import tools


def page() -> str:
    """The page of all names, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Coming from TRL, verl or diffusers"
    yield ""
    yield "The names of these tools' settings in a recipe of mmrl. The message about an unknown key names them, too."
    yield "Values keep their meaning unless the note says otherwise. `python tools/from_others_page.py` makes the page;"
    yield "a test compares the two. A reward function of TRL or verl gets"
    yield "[one more line](rewards.md#a-reward-of-trl-or-verl)."
    for tool, names in tools().items():
        yield from ("", f"## {tool}", "", f"| {tool} | mmrl | note |", "|---|---|---|")
        for name, here in names.items():
            yield f"| `{name}` | {', '.join(f'`{key}`' for key in here.keys) or '-'} | {here.note} |"


if __name__ == "__main__":
    print(page(), end="")
