"""Pictures of several sizes in one run (``sampling.buckets``): at which size a prompt is sampled, and that all that
samples, trains, measures and plans goes by it."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.app.build import build
from mmrl.app.sample import draw
from mmrl.app.trainer import Trainer
from mmrl.cli import app
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.config.sampling import Sampling, Size
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.randomness import noise
from mmrl.core.signals import Stop
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import AskedSize, Prompt, Rows, SampleId, Slot
from mmrl.data.buckets import SizesInNoBucket, SizesNotUsed, bucket_of, by_size
from mmrl.data.build import _members
from mmrl.data.loading import load_prompts
from mmrl.logging.rundir import RunDir
from mmrl.pipelines.diffusion import contract
from mmrl.planner.buckets import others
from mmrl.planner.operations import Call, Operations, Work, mean_of
from mmrl.planner.plan import plan
from mmrl.training.loop import train_step
from tests.support import families, picture_dpo
from tests.support.tiny_diffusion import save, two_blocks

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion.pictures import fitted  # noqa: E402

BUCKETS = "sampling.buckets=[[32, 32], [24, 32], [32, 24]]"
SIZES = [{}, {"height": 24, "width": 32}, {"aspect_ratio": "3:4"}]
"""What records say, in turn, and at which sizes they are sampled."""
EXPECTED = [(32, 32), (24, 32), (32, 24)]
SMALL = [
    "train.prompts_per_step=3",
    "train.group_size=2",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    "sampling.window={size: 2}",
    "optim.ema_decay=null",
    'rewards=[{name: "jpeg:compressibility"}]',
    "eval.rewards=[]",
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A file of twelve prompts whose records name the sizes in turn, and one where all name the first."""
    folder = tmp_path_factory.mktemp("buckets")
    captions = mmrl.load("datasets", "shapes").prompts("train")[:12]
    for name, says in (("mixed", SIZES), ("one", [{"height": 24, "width": 32}])):
        rows = [{"prompt": p.text, "meta": p.meta} | says[n % len(says)] for n, p in enumerate(captions)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def loaded(records, *overrides, name="mixed"):
    """The shipped recipe on two blocks of its model, with prompts of a file."""
    source = f"{{path: {records}/{name}.jsonl, heldout: 0}}"
    data = f"data={{name: jsonl, train: {source}, heldout: {source}}}"
    return load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", data, *SMALL, *overrides])


def make(records, *overrides, name="mixed"):
    found = loaded(records, *overrides, name=name)
    return build(found.recipe)


def prompt(name="p", text="a cat", media=(), **says):
    return Prompt(name, text, media=media, size=AskedSize(**says))


def step(run, n=0):
    """The row of a training step, and the samples that its rewards were given."""
    seen, samples = [], run.pipeline.samples

    def watched(trajectory, inputs):
        seen.append((trajectory, samples(trajectory, inputs)))
        return seen[-1][1]

    run.pipeline.samples = watched
    row, _ = train_step(run, n, Clock(torch.device("cpu")))
    run.pipeline.samples = samples
    return row, seen


# -- which size ------------------------------------------------------------------------------------------------------


def sampling(*buckets, **settings):
    return Sampling.model_validate({"buckets": [list(b) for b in buckets], **settings})


def png(width, height, shade=0, **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, shade, shade)).save(file, "PNG", **options)
    return Media("image", data=file.getvalue())


THREE = sampling((64, 64), (48, 80), (80, 48), (128, 128))


@pytest.mark.parametrize(
    ("says", "size"),
    [
        ({}, (64, 64)),
        ({"height": 48, "width": 80}, (48, 80)),
        ({"height": 80.0, "width": "48"}, (80, 48)),  # of a table with gaps, of a CSV file
        ({"height": 30, "width": 50}, (48, 80)),  # of no bucket: the nearest aspect
        ({"height": 120, "width": 125}, (128, 128)),  # of two of that aspect: the nearest number of pixels
        ({"height": 48, "width": 60}, (64, 64)),  # |log| of 1.25 and 1 is less than of 1.25 and 5 / 3
        ({"height": 48, "width": 63}, (48, 80)),
        ({"aspect_ratio": 1.6}, (48, 80)),
        ({"aspect_ratio": "9:16"}, (80, 48)),
        ({"aspect_ratio": "0.6"}, (80, 48)),
        ({"aspect_ratio": "1/1"}, (64, 64)),
        ({"height": 64, "width": 64, "aspect_ratio": "9:16"}, (64, 64)),
        ({"media": (png(160, 90),)}, (48, 80)),
        ({"media": (png(160, 90),), "aspect_ratio": 0.5}, (80, 48)),
        ({"media": (png(90, 160), png(160, 90))}, (80, 48)),  # a pair: the better one
    ],
)
def test_a_prompt_goes_to_the_bucket_that_fits_it(says, size):
    assert bucket_of(prompt(**says), THREE) == size


def test_a_picture_that_its_file_says_is_turned_counts_as_it_is_shown():
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    assert bucket_of(Prompt("p", "a cat", media=(png(160, 90, exif=turned),)), THREE) == (80, 48)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"height": 0, "width": 64}, '"height" is 0'),
        ({"height": 64, "width": -64}, '"width" is -64'),
        ({"height": "tall", "width": 64}, "\"height\" is 'tall'"),
        ({"height": 64.5, "width": 64}, '"height" is 64.5'),
        ({"height": True, "width": 64}, '"height" is True'),
        ({"height": 64}, 'has "height" and no "width"'),
        ({"aspect_ratio": 0}, '"aspect_ratio" is 0'),
        ({"aspect_ratio": "wide"}, "\"aspect_ratio\" is 'wide'"),
        ({"aspect_ratio": "16:0"}, "\"aspect_ratio\" is '16:0'"),
        ({"aspect_ratio": [16, 9]}, '"aspect_ratio" is'),
        ({"media": (Media("image", data=b"no picture"),)}, "mend the picture"),
    ],
)
def test_what_is_no_size_is_named(says, why):
    with pytest.raises(BadPromptError, match=why):
        bucket_of(prompt(**says), THREE)
    if "media" not in says:  # without buckets nobody reads it
        assert bucket_of(prompt(**says), Sampling(height=64, width=32)) == (64, 32)


def test_the_first_bucket_is_the_size_unless_one_is_given():
    assert sampling((48, 80), (80, 48)).size == (48, 80)
    assert sampling((48, 80), (80, 48), height=80, width=48).size == (80, 48)
    prompts = [prompt(str(n), **SIZES[n % 3]) for n in range(5)]
    assert by_size(prompts, sampling(*EXPECTED)) == [[0, 3], [1, 4], [2]]
    assert by_size(prompts, Sampling(height=32, width=32)) == [[0, 1, 2, 3, 4]]


# -- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(records):
    run = make(records, BUCKETS)
    began = [p.detach().clone() for p in run.policy.trainable.values()]
    row, seen = step(run)
    for parameter, value in zip(run.policy.trainable.values(), began, strict=True):
        parameter.data.copy_(value)
    return run, row, seen


def test_a_group_has_the_size_of_its_prompt_and_a_micro_batch_one(mixed):
    run, row, seen = mixed
    sizes = {}
    for trajectory, samples in seen:
        assert len({s.image.size for s in samples}) == 1
        for sample in samples:
            want = bucket_of(sample.prompt, run.recipe.denoising)
            assert (sample.image.height, sample.image.width) == want
            sizes[sample.id.slot] = want
        own = noise(run.recipe.seed, trajectory.ids, "initial", run.pipeline.sizes.shape(trajectory.slots))
        assert own.shape == trajectory.clean.shape
    assert len(set(sizes.values())) > 1, "the step has several"
    assert row["policy/first_ratio_max_dev"] == 0
    assert row["reward/std"] > 0


def test_a_sample_does_not_depend_on_what_is_sampled_beside_it(mixed):
    run, _, seen = mixed
    for trajectory, _ in seen:
        run.pipeline.encode(trajectory.slots)
        alone = run.pipeline.sample(trajectory.slots, trajectory.ids, trajectory.actions.tolist(), run.recipe.seed)
        assert torch.equal(alone.clean, trajectory.clean)


def test_where_all_prompts_are_of_one_bucket_it_is_the_run_of_that_size_to_the_bit(records):
    several = make(records, BUCKETS, name="one")
    with pytest.warns(SizesNotUsed, match="list the sizes in sampling.buckets"):
        plain = make(records, "sampling.height=24", name="one")
    rows = []
    for run in (several, plain):
        rows.append(step(run)[0])
    assert rows[0] == rows[1]
    for a, b in zip(several.policy.trainable.values(), plain.policy.trainable.values(), strict=True):
        assert torch.equal(a, b)


FORWARD = ["sampling.window=null", "sampling.same_initial_noise=false"]
TARGET = [*FORWARD, "train.group_size=1", 'rewards=[{name: "colour:target", options: {rgb: [60, 95, 235]}}]']


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.updates_per_step=2", "sampling.batch_size=2", "algorithm.kl_coef=0.01", "train.steps_per_forward=2"],
        pytest.param(
            ["algorithm={type: flow_grpo, dynamic_sampling: true, max_attempts: 2}", "rewards=[{name: shapes}]"],
            marks=pytest.mark.slow,
        ),
        ["algorithm={type: diffusion_nft, noise_levels: 2}", *FORWARD],
        ["algorithm={type: draft, last_steps: 1}", *TARGET],
    ],
)
def test_every_kind_of_objective_trains_with_several_sizes(records, overrides):
    run = make(records, BUCKETS, *overrides)
    before = [p.clone() for p in run.policy.trainable.values()]
    row, _ = step(run)
    assert row.get("policy/first_ratio_max_dev", 0) <= 1e-6  # two updates join rows of several micro-batches
    assert any(not torch.equal(a, b) for a, b in zip(before, run.policy.trainable.values(), strict=True))


# -- families --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    made = {family: save(family, root / family) for family in ("flux", "sdxl", "flux2_klein")}
    return {"sd3": two_blocks(), "flux2_klein_edit": made["flux2_klein"]} | made


@pytest.mark.parametrize(
    ("family", "guidance"), [("sd3", 4.0), ("flux", 3.0), ("sdxl", 4.0), ("flux2_klein_edit", 1.0)]
)
def test_pictures_are_the_stock_pipelines_at_their_size(folders, family, guidance):
    sizes = [(64, 64), (64, 96)] if family == "flux2_klein_edit" else [(32, 32), (16, 32)]
    recipe = families.recipe(
        family, folders, guidance_scale=guidance, buckets=sizes, height=sizes[0][0], width=sizes[0][1]
    )
    case = contract.Case(recipe)
    pipe = case.pipeline.adapter.pipe
    pipe.set_progress_bar_config(disable=True)
    for size in sizes:
        media = case.slots[0].prompt.media
        asked = replace(case.slots[0].prompt, size=AskedSize(*size))
        slot, name = Slot(0, 0, 0, asked), SampleId(0, 0, 0, 0)
        case.pipeline.encode([slot])
        mine = case.pipeline.images(case.pipeline.sample([slot], [name], [], seed=5))
        adapter, shape = case.pipeline.adapter, case.pipeline.sizes.shapes[Size(*size)]
        given = {} if not media else {"image": fitted(asked, media[0], Size(*size))}
        stock = pipe(
            prompt=asked.text,
            num_inference_steps=3,
            height=size[0],
            width=size[1],
            **adapter.given_noise(noise(5, [name], "initial", shape)),
            output_type="pt",
            **(adapter.call() | given),
        )
        assert mine.shape[2:] == size
        torch.testing.assert_close(mine, stock.images.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "bucket", "why"),
    [
        ("sd3", [30, 32], "sampling.buckets: 30 x 32 is no multiple of"),
        ("sd3", [64, 32], "sampling.buckets: 64 x 32 is more than the 32 pixels a side"),
        ("flux", [32, 30], "sampling.buckets: 32 x 30 is no multiple of"),
    ],
)
def test_a_size_that_the_checkpoint_cannot_make_is_refused_before_training(folders, family, bucket, why):
    recipe = families.recipe(family, folders, buckets=[[32, 32], bucket])
    with pytest.raises(UserError, match=why):
        mmrl.load("pipelines", recipe.pipeline).describe(recipe, recipe.model.path, None)


def test_edited_pictures_are_brought_to_the_bucket_of_their_aspect(folders):
    recipe = families.recipe("flux2_klein_edit", folders, buckets=[[64, 64], [64, 96], [96, 64]])
    pipeline = contract.Case(recipe).pipeline
    prompts = [Prompt(str(n), "make it red", media=(png(*wh),)) for n, wh in enumerate([(50, 50), (90, 60), (60, 90)])]
    slots = [Slot(0, n, 0, prompt) for n, prompt in enumerate(prompts)]
    keys = pipeline.encode(slots)
    assert len(set(keys)) == 3
    for slot, key in zip(slots, keys, strict=True):
        drawn = pipeline.sample([slot], [SampleId(0, slot.index, 0, 0)], [0], seed=0)
        assert pipeline.features.get(key)["source"].shape == drawn.clean.shape[1:]
    with pytest.raises(ValueError, match="a batch is of one size, and this one has"):
        pipeline.sample(slots[:2], [SampleId(0, 0, 0, 0), SampleId(0, 1, 0, 0)], [0], seed=0)


def test_pairs_are_compared_at_the_size_of_the_better_picture():
    run = picture_dpo.make(BUCKETS)
    pipeline, shapes = run.pipeline, run.pipeline.sizes.shapes
    slots = [
        Slot(0, n, 0, prompt(str(n), media=(png(*wh), png(40, 40, 255)), **says))
        for n, (wh, says) in enumerate([((40, 30), {}), ((30, 40), {}), ((30, 40), {"height": 32, "width": 32})])
    ]
    pipeline.encode(slots)
    for slot, size in zip(slots, [(24, 32), (32, 24), (32, 32)], strict=True):
        rows = Rows([slot], [SampleId(0, slot.index, 0, 0)])
        assert pipeline.pairs.latents([slot]).shape == (2, *shapes[size])
        found = pipeline.compare(rows, run.objective.needs, run.policy.using)
        assert torch.equal(found["chosen_error"].detach(), found["reference_chosen_error"])
    assert {key for key in pipeline.features._refs if key.startswith("given/")} == {
        pipeline.pairs.key(slot.prompt) for slot in slots
    }
    row, _ = train_step(replace(run, prompts=[slot.prompt for slot in slots] * 4), 0, Clock(torch.device("cpu")))
    assert row["optim/grad_norm"] > 0


# -- a run -----------------------------------------------------------------------------------------------------------


RUN = [BUCKETS, "train.steps=2", "eval.every=2", "eval.samples=6", "eval.grid=6", "checkpoint.every=1"]


def train(records, out, *, resume=False):
    """The rows of a run."""
    found = loaded(records, *RUN)
    with RunDir.create(out, resume=resume) as directory:
        directory.write_recipe(found.paths, found.overrides, found.resolved())
        assert Trainer(found, directory).begin(Stop(), resume=resume).error is None
    return [timeless(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(line):
    timed = ("time", "perf", "features/")  # a fresh process has not encoded the first step's prompts
    return {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}


@pytest.fixture(scope="module")
def whole(records, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, train(records, out)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_not_stopped(records, whole, tmp_path):
    out, rows = whole
    stopped = tmp_path / "run"
    shutil.copytree(out, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step_000002")
    assert train(records, stopped, resume=True) == rows
    held = [timeless((folder / "heldout.jsonl").read_text().splitlines()[-1]) for folder in (out, stopped)]
    assert held[0] == held[1]


def test_an_evaluation_keeps_the_order_of_its_prompts_and_their_sizes(records, whole):
    out, _ = whole
    listed = json.loads((out / "samples" / "step_000002.json").read_text())["samples"]
    prompts = mmrl.load("datasets", "jsonl").prompts("heldout", path=str(records / "mixed.jsonl"), heldout=0)
    assert [row["prompt"] for row in listed] == [prompt.text for prompt in prompts[:6]]
    sizes = [Image.open(out / "samples" / row["file"]).size for row in listed]
    assert sizes == [(width, height) for height, width in EXPECTED * 2]


def test_mmrl_sample_draws_each_prompt_at_its_size(records, whole, tmp_path, capsys):
    out, _ = whole
    prompts = [prompt(str(n), "a red circle", **says) for n, says in enumerate([*SIZES, {"height": -1, "width": 3}])]
    folder = draw(out, prompts, tmp_path / "drawn", n=2)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    sizes = [(row["id"], Image.open(folder / row["file"]).size) for row in rows]
    assert sizes == [(str(n), EXPECTED[n][::-1]) for n in range(3) for _ in range(2)]
    assert '"height" is -1' in capsys.readouterr().err


def test_the_card_draws_the_prompt_at_its_size(mixed):
    run = mixed[0]
    code = run.pipeline.usage("here", "lora", prompt(height=24, width=32)).code["With diffusers"]
    assert "height=24,\n    width=32," in code


# -- data ------------------------------------------------------------------------------------------------------------


def test_records_that_say_no_size_are_left_out_counted_and_named(tmp_path, capsys):
    says = [*SIZES, {"height": 20, "width": 30}, {"height": 0, "width": 32}, {"aspect_ratio": "wide"}, {"width": 3}]
    rows = [{"prompt": f"a red circle {n}"} | say for n, say in enumerate(says)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(SizesInNoBucket, match=r"1 of 7 records have a size that is in no bucket .* 20 x 30"):
        prompts = load_prompts(loaded(tmp_path, BUCKETS, "data.max_bad_fraction=0.5").recipe, "train")
    assert len(prompts) == 4
    assert [bad.why.split(";")[0] for bad in prompts.bad] == [
        '"height" is 0',
        "\"aspect_ratio\" is 'wide'",
        'has "width" and no "height"',
    ]
    with pytest.raises(UserError, match=r"3 of 7 records cannot be used"):
        load_prompts(loaded(tmp_path, BUCKETS).recipe, "train")
    source = f"{{path: {tmp_path}/mixed.jsonl, heldout: 0}}"
    settings = [f"data={{name: jsonl, train: {source}, heldout: {source}}}", BUCKETS]
    (tmp_path / "recipe.yaml").write_text(json.dumps(loaded(tmp_path, *settings).resolved()))
    capsys.readouterr()
    assert app(["data", "check", str(tmp_path / "recipe.yaml"), "--json"], standalone_mode=False) == 1
    found = json.loads(capsys.readouterr().out)
    split = found["splits"]["train"]
    assert split["sizes"] == {"32 x 32": 1, "24 x 32": 2, "32 x 24": 1}
    assert [record["settings"]["size"] for record in split["shown"]] == ["32 x 32", "24 x 32", "32 x 24"]
    assert sum(split["left_out"].values()) == 3
    assert found["settings"]["buckets"] == ["32 x 32", "24 x 32", "32 x 24"]


def test_columns_prompt_files_and_shards_keep_the_size(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "h": 24, "w": 32}\n{"prompt": "b", "h": 32, "w": 24}\n')
    jsonl = mmrl.load("datasets", "jsonl").prompts
    found = jsonl(path=str(tmp_path / "p.jsonl"), heldout=0, columns={"height": "h", "width": "w"})
    assert [p.size[:2] for p in found] == [(24, 32), (32, 24)]
    (tmp_path / "q.jsonl").write_text(
        '{"prompt": "a", "aspect_ratio": "3:4"}\n{"prompt": "a", "height": 24, "width": 32}\n{"prompt": "a"}\n'
    )
    found = mmrl.load("datasets", "prompts").prompts(path=str(tmp_path / "q.jsonl"), heldout=0)
    assert [bucket_of(p, sampling(*EXPECTED)) for p in found] == [(32, 24), (24, 32), (32, 32)], "one text, three sizes"
    kept = json.loads(_members(found[1], "png")["json"])
    assert (kept["height"], kept["width"], "aspect_ratio" in kept) == (24, 32, False)


# -- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_has_the_memory_of_the_largest_and_the_work_of_the_mean(records):
    several = plan(loaded(records, "sampling.buckets=[[32, 32], [24, 32]]"))
    square = plan(loaded(records))
    assert not several.problems
    for name in ("trajectory", "picture", "encode", "sample", "decode", "train", "optimizer"):
        assert getattr(several.measured, name) == getattr(square.measured, name), name
    for name in ("sample", "decode", "train", "forward"):  # a third of the prompts has three quarters of the pixels
        share = getattr(several.measured.operations, name).flops / getattr(square.measured.operations, name).flops
        assert 11 / 12 - 0.03 < share < 11 / 12 + 0.03, name
    assert several.measured.operations.encode == square.measured.operations.encode
    (note,) = [note for note in several.notes if note.startswith("sampling.buckets")]
    assert "the largest, 32 x 32" in note
    assert "32 x 32: 8, 24 x 32: 4" in note


def test_the_work_of_many_sizes_is_that_of_the_most_frequent_numbers_of_pixels():
    sizes = [Size(8, 8), Size(4, 16), Size(8, 10), Size(8, 12), Size(8, 14), Size(8, 16)]
    found = others(dict(zip(sizes, [1, 2, 4, 5, 1, 7], strict=True)), Size(8, 16))
    assert dict(found) == pytest.approx({Size(8, 8): 3 / 20, Size(8, 10): 4 / 20, Size(8, 12): 5 / 20})
    call = Call("mul", "float32", (), 0, 4, "forward")
    one, two = (Operations(*(Work({call: n}) for n in of)) for of in ((1, 2, 3, 4, 100), (5, 6, 7, 8, 200)))
    mean = mean_of([(one, 0.25), (two, 0.75)])
    assert [work[call] for work in vars(mean).values()] == [4, 5, 6, 7, 175, 0, 0]


def test_a_plan_refuses_a_size_that_the_checkpoint_cannot_make(records):
    made = plan(loaded(records, "sampling.buckets=[[32, 32], [30, 32], [64, 64]]"))
    assert [p.split(";")[0] for p in "\n".join(made.problems).splitlines()] == [
        "sampling.buckets: 30 x 32 is no multiple of 4, which this checkpoint's VAE and patches need",
        "sampling.buckets: 64 x 64 is more than the 32 pixels a side that this checkpoint has positions for",
    ]


@pytest.mark.parametrize(
    ("buckets", "why"),
    [
        ("[[24, 32], [32, 24]]", r"32 x 32 \(sampling.height x sampling.width\).* is none of them; add \[32, 32\]"),
        ("[[32, 32], [32, 32]]", "32 x 32 is listed twice"),
        ("[]", "sampling.buckets"),
        ("[[32]]", r"sampling.buckets\[0\]"),
        ("[[32, 32, 32]]", r"sampling.buckets\[0\]"),
        ("[[32, -32]]", r"sampling.buckets\[0\]\[1\]"),
        ("32", "sampling.buckets"),
    ],
)
def test_a_recipe_with_wrong_buckets_is_refused(records, buckets, why):
    with pytest.raises(RecipeError, match=why):
        loaded(records, f"sampling.buckets={buckets}")


def test_text_has_no_buckets():
    with pytest.raises(RecipeError, match="buckets"):
        load_recipe(["sums"], ["sampling.buckets=[[32, 32]]"])
