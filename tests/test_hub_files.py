"""What a library is about to read is looked at first, in folders and in the hub's cache."""

import pytest

from mmrl.errors import UserError
from mmrl.hub_files import check_files


def snapshot(cache, config, **links):
    """A model as the hub's client keeps it: links to blobs, below a name and a revision."""
    of = cache / "models--ours--tiny"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (of / folder).mkdir(parents=True)
    (of / "refs" / "main").write_text("abc")
    (of / "blobs" / "1").write_text(config)
    (of / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/1")
    for name, target in links.items():
        (of / "snapshots" / "abc" / f"{name}.json").symlink_to(target)


@pytest.mark.parametrize(
    ("config", "links", "refused"),
    [
        ("{}", {}, ""),
        ('{"a": ' * 2000 + "1" + "}" * 2000, {}, "config.json"),
        ("[1]", {}, "holds no mapping"),
        ("{}", {"tokenizer": "/etc/hostname"}, "tokenizer.json cannot be read"),
        ("{}", {"special_tokens_map": "/dev/zero"}, "special_tokens_map.json cannot be read"),
    ],
)
def test_files_in_the_hubs_cache_are_looked_at_too(config, links, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot(tmp_path, config, **links)
    check_files("ours/other")
    check_files("no name of the hub: at all")
    if not refused:
        check_files("ours/tiny")
        return
    with pytest.raises(UserError, match=refused):
        check_files("ours/tiny")
