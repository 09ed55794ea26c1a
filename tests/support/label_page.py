"""Shared by the tests of label page and others."""

import contextlib
import json
import threading

import pytest
from PIL import Image

from mmrl.rewards.learned.labels.items import items_of
from mmrl.studies.labels import table
from mmrl.studies.labels.server import YES_NO, LabelServer, in_order

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"


@contextlib.contextmanager
def serving(root, answers=YES_NO, order=()):
    with LabelServer(in_order(items_of(root), order), root, root / table.NAME, answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def answers(tmp_path):
    """Answers to a question about two pictures, of which the list names one that lies outside of the folder too."""
    root = tmp_path / "answers"
    (root / "prompts").mkdir(parents=True)
    for colour in ("red", "blue"):
        Image.new("RGB", (8, 8), colour).save(root / "prompts" / f"{colour}.png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    pictures = ["prompts/red.png", "../secret.png", "prompts/blue.png", 7]
    rows = [{"prompt": f"Which? {HOSTILE}", "text": text, "pictures": pictures} for text in ("first", "second")]
    (root / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root
