"""Print the words of each page of the site, and their sum without the reference: ``python tools/words.py [FOLDER]``.

A word is what stands between two white spaces and has a letter or a digit: text, code and tables alike. The bars of a
table, and a lone ``=`` or ``-``, are no words; an address is one. Pages of ``reference/``, which are looked up and not
read, are counted apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = "reference"


def words(text: str) -> int:
    """The number of words of a page's Markdown."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def pages(folder: Path) -> dict[str, int]:
    """The words of each page by its path in ``folder``, the longest first. Raises ``SystemExit`` if it has no page."""
    found = {page.relative_to(folder).as_posix(): words(page.read_text("utf-8")) for page in folder.rglob("*.md")}
    if not found:
        raise SystemExit(f"{folder} has no page (*.md); give the folder of the site's pages")
    return dict(sorted(found.items(), key=lambda page: (-page[1], page[0])))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DOCS, help="of the pages (docs)")
    found = pages(parser.parse_args().folder)
    for page, count in found.items():
        print(f"{count:7,}  {page}")
    reference = sum(count for page, count in found.items() if page.startswith(f"{REFERENCE}/"))
    print(f"{sum(found.values()) - reference:7,}  all without {REFERENCE}/")
    print(f"{reference:7,}  {REFERENCE}/")


if __name__ == "__main__":
    main()
