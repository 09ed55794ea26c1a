"""Sharded weights do what whole ones do: samples, gradients, weights and copies, over real gloo process groups."""

import json
import shutil

import pytest
import torch

from mmrl.core import checkpoint_reader as reader
from tests.support import damage
from tests.support.sharded import close, joined, make, together, whole, work

LOAD = {"balance/load", "balance/load_predicted"}
"""What there is to say of several controllers alone."""


def check(name, sizes, folder, steps=1):
    one = work(make(name), steps)
    for size in sizes:
        found = together(name, size, folder, steps)
        theirs = [rank["sampled"] for rank in found]
        assert all(theirs), "a controller sampled nothing"
        assert sum(map(len, theirs)) == len(one["sampled"])
        assert {key: value for rank in theirs for key, value in rank.items()} == one["sampled"]  # to the bit
        close([rank["gradient"] for rank in found], one["gradient"])
        close([rank["weights"] for rank in found], one["weights"], 1e-4)
        for copy, values in one["copies"].items():
            close([rank["copies"][copy] for rank in found], values, 1e-4)
        for rank in found:
            assert rank["rows"][0].keys() - LOAD == one["rows"][0].keys()
            for key, value in one["rows"][0].items():
                if key in ("sampling/rounds", "balance/padding"):
                    continue  # each controller draws as often as its own groups need, and packs its own rows
                if key.startswith(("mismatch/", "policy/ratio", "policy/first")):
                    assert rank["rows"][0][key] == pytest.approx(value, abs=1e-4), key
                else:
                    assert rank["rows"][0][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
            kinds = {"gradients", "weights", "numbers", "statistics"}
            assert {"gradients", "weights"} <= set(rank["sent"]) <= kinds
        held = max(rank["held"] for rank in found)
        print(f"{name}: bytes of weights, optimizer and copies on a rank: {one['held']} -> {held} of {size}")
        assert held <= 1.25 * one["held"] / size
    return one


@pytest.mark.slow
def test_two_ranks_with_half_the_weights_each(tmp_path):
    check("text", [2], tmp_path)


@pytest.mark.slow
def test_two_ranks_with_rows_in_lines(tmp_path):
    """They do what one does with whole weights, whose gradient is that of padded rows."""
    packed = check("lines", [2], tmp_path)
    close([packed["gradient"]], work(make("text"))["gradient"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("text", "critic", "full")), "lora"]
)
def test_weights_gathered_in_half_precision(name, tmp_path):
    """Half the bytes of weights go to the other rank. Shards, gradients and the bytes of these stay float32, and the
    gradient is near that of weights gathered in float32."""
    half, folder = "model.dtype=bfloat16", tmp_path / "asked"
    folder.mkdir()
    plain = together(name, 2, tmp_path, "1", half)
    asked = together(name, 2, folder, "1", half, "performance.gather_dtype=bfloat16")
    share = asked[0]["sent"]["weights"] / plain[0]["sent"]["weights"]
    assert share == pytest.approx(0.5, abs=0.01) if name != "lora" else 0.5 < share < 1
    for one, other in zip(plain, asked, strict=True):
        assert other["sent"]["gradients"] == one["sent"]["gradients"]
        assert other["held"] == one["held"]
        assert {t.dtype for t in (*other["gradient"], *other["weights"])} == {torch.float32}
    one, other = (joined([rank["gradient"] for rank in ranks]) for ranks in (plain, asked))
    if name == "lora":  # it multiplies by copies in bfloat16, whoever makes them
        assert torch.equal(one, other)
    elif name != "full":  # its checkpoint has nothing to round yet, and autocast rounds what it computes
        assert not torch.equal(one, other), "what is gathered must be rounded"
    assert torch.cosine_similarity(one, other, 0) > 0.99


def same_step(before, after):
    """Whether the third step was that of the run that went on, by every rank's part of it."""
    assert {k: v for rank in after for k, v in rank["seen"].items()} == {
        k: v for rank in before for k, v in rank["seen"].items()
    }
    for rank in after:
        assert rank["counts"] == before[0]["counts"] != []
        for key, value in before[0]["row"].items():
            if key.startswith("balance/"):
                continue  # of time, and of who holds which rows
            if key.startswith(("mismatch/", "policy/ratio", "policy/first")):
                assert rank["row"][key] == pytest.approx(value, abs=1e-4), key
            else:
                assert rank["row"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def check_elastic(name, size, after, folder):
    before = together(name, size, folder, "save")
    files = {path.name for path in (folder / "checkpoints" / "step_000002").iterdir()}
    assert files == {"manifest.json", "state.json"} | {
        f"shard-{n + 1:05d}-model-00001-of-00001.safetensors" for n in range(size)
    }
    for n in after:
        found = together(name, n, folder, "go_on")
        same_step(before, found)
        for one, other in [(whole(found, "weights"), whole(before, "weights"))] + [
            (whole(found, "copies", copy), whole(before, "copies", copy)) for copy in before[0]["copies"]
        ]:
            assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.slow
def test_a_checkpoint_in_shards_goes_on_with_another_number_and_a_torn_one_is_passed_over(tmp_path):
    check_elastic("lora", 2, [1], tmp_path)
    folder = tmp_path / "checkpoints"
    for harm in damage.ALL:  # of one rank's shard
        newer = folder / "step_000003"
        shutil.copytree(folder / "step_000002", newer)
        manifest = json.loads((newer / "manifest.json").read_text())
        (newer / "manifest.json").write_text(json.dumps(manifest | {"step": 3}))  # which decides, not the name
        says = harm(newer, newer / "shard-00002-model-00001-of-00001.safetensors")
        assert says in damage.passed_over(folder, 2, 3)
        shutil.rmtree(newer)


@pytest.mark.slow
def test_a_full_disk_of_one_is_told_by_all_and_the_next_save_is_whole(tmp_path):
    for rank in together("text", 2, tmp_path, "full_disk"):
        assert "the checkpoint of step 1 could not be saved (File too large); there is none yet" in rank["failed"]
        assert rank["saved"] == [0, 2]
        assert rank["left"] == ["step_000002"]
    found, _ = reader.load_latest(tmp_path / "checkpoints")
    assert found is not None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "text"])
def test_a_checkpoint_of_four_goes_on_with_any_number(name, tmp_path):
    check_elastic(name, 4, [1, 2, 3], tmp_path)


@pytest.mark.slow
def test_whole_weights_and_shards_read_each_others_checkpoints(tmp_path):
    before = together("text", 2, tmp_path, "save", "train.backend=replicated")
    assert (tmp_path / "checkpoints" / "step_000002" / "weights.safetensors").exists()
    same_step(before, together("text", 2, tmp_path, "go_on"))
    in_shards = tmp_path / "in_shards"
    in_shards.mkdir()
    before = together("text", 2, in_shards, "save")
    same_step(before, together("text", 2, in_shards, "go_on", "train.backend=replicated"))


@pytest.mark.slow
def test_two_ranks_train_pictures_with_a_moving_average(tmp_path):
    check("lora", [2], tmp_path, steps=2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "full", "nft", "text", "dynamic", "half", "critic", "vision"])
def test_any_number_of_ranks_and_every_kind(name, tmp_path):
    check(name, [4] if name == "text" else [2, 4], tmp_path, steps=2)
