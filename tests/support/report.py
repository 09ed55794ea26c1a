"""Shared by the tests of report and others."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = (
    "<script>alert('x')</script><img src=http://evil.example/x.png onerror=alert(1)>\n\"quoted\" & 'more' </script>"
)


class Page(HTMLParser):
    """Tags, attributes and visible text of a page, as a browser would part them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data
