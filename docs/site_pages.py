"""Hook of MkDocs: files of the repository outside ``docs/`` that pages link to become pages of the site.

``examples/reward.py`` is the page ``repository/examples/reward.py.md``, its text in a block of code; a Markdown file
keeps its name. A notebook becomes a page of its text, its code and what it printed. Links that lead from one to the
other are written for where the pages are in the site. So the same link works on a code host and in the site.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/log/*.md",
    "examples/*.md",
    "examples/*.py",
    "examples/notebooks/*.ipynb",
    "examples/recipes/*.py",
    "examples/recipes/*.yaml",
    "examples/served/*.md",
)
LANGUAGES = {".py": "python", ".yaml": "yaml"}
LINK = re.compile(r"\]\(([^)\s#:]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files that ``SHOWN`` names."""
    for path in _shown():
        text = (ROOT / path).read_text(encoding="utf-8")
        language = LANGUAGES.get(posixpath.splitext(path)[1])
        content = text if language is None else f"# {path}\n\n```{language}\n{text}```\n"
        if path.endswith(".ipynb"):
            content = "\n\n".join(_cells(json.loads(text)))
        files.append(File.generated(config, _uri(path), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links between ``docs/`` and the rest of the repository for the site."""
    here = page.file.src_uri
    path = here.removeprefix("repository/") if here.startswith("repository/") else f"docs/{here}"

    def written(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        if not (ROOT / target).is_file():
            return link[0]  # of a block of code, or broken: MkDocs says so
        return f"]({posixpath.relpath(_uri(target), posixpath.dirname(here) or '.')}"

    return LINK.sub(written, markdown)


def _shown() -> Iterator[str]:
    return (file.relative_to(ROOT).as_posix() for pattern in SHOWN for file in sorted(ROOT.glob(pattern)))


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells of a notebook as Markdown, each with what it printed."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            yield _output(output)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        said = html.escape("".join(data["text/plain"]))
        return f'<img alt="{said}" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        return "\n".join(line.strip() for line in table.splitlines() if line.strip())
    text = "".join(output.get("text") or data.get("text/plain", ""))
    kind = "what it reports while it works" if output.get("name") == "stderr" else None
    block = f"<pre>{html.escape(text.rstrip())}</pre>"
    return block if kind is None else f"<details><summary>{kind}</summary>{block}</details>"


def _uri(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"
