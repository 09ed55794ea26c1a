"""``mmrl init`` writes a recipe that ``mmrl plan`` accepts, and says what is missing."""

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

import mmrl
from mmrl import cli
from mmrl.cli import init
from mmrl.config.left_to_plan import left_open
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.episodes.tools import Toolbox, schemas_of
from mmrl.planner.new_recipe import model as first_model
from mmrl.planner.new_recipe.data import UnknownColumnError, look_at_data
from mmrl.planner.new_recipe.model import Modality, look_at_model
from mmrl.planner.new_recipe.reward import named_in_recipe, starting_point, usual_reward
from tests.support import tiny, tiny_diffusion

QUESTIONS = "Question,Solution,level\n" + "".join(f"What is {n} + 1?,{n + 1},1\n" for n in range(20))
SEES = importlib.util.find_spec("torchvision") is not None


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by modality."""
    allow_cpu_only()
    folder = tmp_path_factory.mktemp("models")
    made = {
        "text": tiny.language_model(folder / "words"),
        "pictures": tiny_diffusion.save("sd", folder / "pictures"),
        "clips": tiny_diffusion.save("wan", folder / "clips"),
        "pictures as tokens": tiny.picture_writer(folder / "written"),
    }
    if SEES:
        made["vision-language"] = tiny.vision_model(folder / "sees", "qwen2_5_vl")
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with data for each modality."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.csv").write_text(QUESTIONS)
    (tmp_path / "captions.txt").write_text("".join(f"{n} red circles\n" for n in range(20)))
    Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    records = [{"prompt": f"{n}: which colour?", "answer": "red", "image": "red.png"} for n in range(20)]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def mmrl_init(*arguments):
    """The exit code."""
    before = sys.argv
    sys.argv = ["mmrl", "init", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    finally:
        sys.argv = before
    return 0


def test_a_recipe_for_a_gpu_leaves_the_micro_batch_to_the_plan(models, folder):
    assert mmrl_init("mine.yaml", "--model", models["text"], "--data", "questions.csv", "--device", "auto") == 0
    made = load_recipe(["mine.yaml"]).recipe
    assert "micro_batch_size: auto # " in Path("mine.yaml").read_text()
    assert "train.micro_batch_size" in left_open(made)
    assert made.train.micro_batch_size == 8


USES = {
    "text": ("questions.csv", "llm/chat", "grpo", "answer:number"),
    "vision-language": ("shown.jsonl", "vlm/chat", "grpo", "answer:exact"),
    "pictures": ("captions.txt", "diffusion/sd", "flow_grpo", "reward.py:score"),
    "clips": ("captions.txt", "diffusion/wan", "flow_grpo", "reward.py:score"),
    "pictures as tokens": ("captions.txt", "llm/emu3", "grpo", "reward.py:score"),
}


@pytest.mark.slow
@pytest.mark.parametrize("modality", USES)
def test_a_recipe_of_each_modality_is_planned_without_problems(modality, models, folder, capsys):
    if modality not in models:
        pytest.skip("needs torchvision")
    data, pipeline, algorithm, reward = USES[modality]
    (folder / "recipes").mkdir()
    file = "recipes/first.yaml"
    code = mmrl_init(file, "--model", models[modality], "--data", data, "--device", "cpu")
    said, wrong = capsys.readouterr()
    assert code == 0, said + wrong
    assert said.endswith(f"next:\n  mmrl data check {file}\n  mmrl plan {file}\n  mmrl train {file}\n")
    text = Path(file).read_text()
    assert 25 <= len(text.splitlines()) <= 45
    assert text.count(" # ") >= 10
    recipe, own = load_recipe([file]).recipe, reward.startswith("reward.py")
    assert (recipe.pipeline, recipe.algorithm.type, recipe.device) == (pipeline, algorithm, "cpu")
    assert [one.name for one in recipe.rewards] == [str(folder / reward) if own else reward]
    assert (f"name: ../{reward}" in text) == own
    assert recipe.data.train["path"] == str(folder / data)
    assert f"path: ../{data}" in text
    assert recipe.model.path == str(models[modality])
    assert recipe.model.lora is not None
    if modality == "pictures":
        assert (recipe.denoising.height, recipe.denoising.width) == (32, 32)  # 16 latents a side, twice that in pixels
    if modality == "pictures as tokens":  # 9 rows of 9 and an end, and 3 more, of 128
        assert (recipe.decoding.max_new_tokens, recipe.decoding.picture.width) == (93, 36)
    if modality in ("text", "vision-language"):
        assert recipe.decoding.max_new_tokens == 128
    assert Path("reward.py").exists() == (reward == "reward.py:score")


def test_a_terminal_is_asked_for_what_no_flag_says(models, folder, monkeypatch, capsys):
    (folder / "odd.csv").write_text("de,en,n\n" + "".join(f"Satz {n},sentence {n},{n}\n" for n in range(9)))
    answers = [str(models["text"]), "odd.csv", "xy", "en", "", "n", "gpu", "cpu", "mine.py:short"]

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("\n".join(answers) + "\n"))
    assert mmrl_init() == 0
    asked = capsys.readouterr().out
    for word in ("Your model", "Your data", "Which column is the prompt? (de, en)", "Algorithm", "LoRA", "Computes on"):
        assert word in asked
    assert "'xy' is none of de, en" in asked
    assert "'gpu' is none of auto, cpu, cuda" in asked
    recipe = load_recipe(["mine.yaml"]).recipe
    assert recipe.data.train["columns"] == {"prompt": "en"}
    assert (recipe.name, recipe.device, recipe.model.lora) == ("mine", "cpu", None)
    assert recipe.rewards[0].name == str(folder / "mine.py:short")
    assert "def short(samples, *, context)" in Path("mine.py").read_text()


def test_a_reward_of_pictures_in_a_recipe_of_text_is_a_problem_and_the_recipe_is_written(models, folder, capsys):
    Path("mine.py").write_text("def score(samples, *, context):\n    return [0.0 for _ in samples]\n")
    flags = ("--model", models["text"], "--data", "questions.csv", "--reward", "mine.py:score", "--device", "cpu")
    assert mmrl_init("first.yaml", *flags, "--full") == 1
    said = capsys.readouterr().out
    assert "problem: rewards[0] (score): reads 'image'" in said or "problem: rewards[0] (mine): reads 'image'" in said
    assert "mine.py:1: @mmrl.reward(inputs=('text',))" in said
    assert load_recipe(["first.yaml"]).recipe.model.lora is None
    Path("mine.py").write_text("never read")
    assert mmrl_init("first.yaml", *flags) == 2  # the recipe is there: nothing is looked at
    assert "first.yaml exists and is left as it is" in capsys.readouterr().err


def test_tools_are_begun_and_named_in_the_recipe(models, folder, capsys):
    flags = ("--model", models["text"], "--data", "questions.csv", "--device", "cpu", "--full")
    mmrl_init("first.yaml", *flags, "--tool", "my.py:words", "--tool", "my.py:other")
    assert "wrote my.py: an example, to change" in capsys.readouterr().out
    section = load_recipe(["first.yaml"]).recipe.environment
    assert section.options["tools"] == [str(folder / "my.py:words"), str(folder / "my.py:other")]
    first, second = schemas_of(Toolbox(section.options["tools"]).tools)
    assert (first["function"]["name"], second["function"]["name"]) == ("words", "other")


MISTAKES = [
    (["--model", "./gone"], "--model: there is no './gone'"),
    (["--model", "nobody/knows-it"], "or say what it makes: --modality text, vision-language, pictures, clips"),
    (["--model", "nobody/knows-it", "--modality", "pictures"], "of which of the pipelines diffusion/flux, "),
    (["--model", "."], "has neither model_index.json (diffusers) nor config.json (transformers)"),
    (["--modality", "pictures"], "is for text: config.json: model_type qwen3; leave --modality out"),
    (["--data", "numbers.csv"], "numbers.csv has no column of text for the prompt; it has a, b"),
    (["--data", "gone.csv"], "--data: there is no 'gone.csv'"),
    (["--data", "nosuch"], "--data: there is no data set 'nosuch'"),
    (["--data", "jsonl"], "--data: jsonl reads files: name the file or the folder"),
    (["--data", "red.png"], "--data: red.png is no .jsonl"),
    (["--prompt-column", "Qestion"], "has no column 'Qestion'; did you mean 'Question'?"),
    (["--reward", "answr:number"], "--reward: there is no reward 'answr'"),
    (["--reward", "made.py:scor"], "has no 'scor'; did you mean 'score'?"),
    (["--reward", "no/such/folder.py:score"], "--reward: there is no folder no/such"),
    (["--tool", "search"], "--tool: search names no file; a tool is a function in one: write --tool tools.py:search"),
    (["--tool", "made.py:scor"], "--tool: "),
    (["--tool", "no/such/folder.py:f"], "--tool: there is no folder no/such"),
    (["--tool", "new.py:f", "--algorithm", "dpo"], "--tool: dpo acts over no turns, and calls nothing; leave it out"),
    (["--algorithm", "dpo", "--reward", "made.py:score"], "dpo trains on what the data gives, and asks no reward"),
    (["--algorithm", "grop"], "did you mean 'grpo'?"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_said_and_nothing_is_written(flags, said, models, folder, capsys):
    (folder / "numbers.csv").write_text("a,b\n1,2\n")
    (folder / "made.py").write_text("def score(samples, *, context):\n    return [0.0 for _ in samples]\n")
    usual = {"--model": models["text"], "--data": "questions.csv"}
    given = [part for flag, value in usual.items() if flag not in flags for part in (flag, value)]
    assert mmrl_init("first.yaml", *given, *flags) == 2
    assert said in capsys.readouterr().err
    assert not Path("first.yaml").exists()
    assert not Path("reward.py").exists()


def test_without_a_terminal_a_missing_flag_is_named(folder, capsys):
    assert mmrl_init("first.yaml", "--data", "questions.csv") == 2
    assert "--model is missing" in capsys.readouterr().err
    assert mmrl_init("first.txt") == 2
    assert "write first.txt.yaml" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_known_from_a_shipped_recipe():
    sees = look_at_model("Qwen/Qwen2.5-VL-3B-Instruct", None, edits=False, algorithm=None)
    assert (sees.modality, sees.pipeline, sees.readable) == (Modality.vision_language, "vlm/chat", False)
    draws = look_at_model("black-forest-labs/FLUX.1-dev", None, edits=False, algorithm=None)
    assert (draws.pipeline, draws.like and draws.like.name) == ("diffusion/flux", "flux-dev")
    for edits, pipeline in ((False, "diffusion/flux2_klein"), (True, "diffusion/flux2_klein_edit")):
        found = look_at_model("black-forest-labs/FLUX.2-klein-base-4B", None, edits=edits, algorithm=None)
        assert found.pipeline == pipeline
    kontext = look_at_model("black-forest-labs/FLUX.1-Kontext-dev", None, edits=True, algorithm=None)
    assert (kontext.pipeline, kontext.like and kontext.like.name) == ("diffusion/flux_kontext", "flux-kontext")
    with pytest.raises(UserError, match="is for pictures, says the recipe flux-dev"):
        look_at_model("black-forest-labs/FLUX.1-dev", Modality.text, edits=False, algorithm=None)
    with pytest.raises(UserError, match=r"of which of the pipelines .*hunyuan_video15, .*diffusion/wan it is"):
        look_at_model("nobody/knows-it", Modality.clips, edits=False, algorithm=None)


def test_a_shipped_model_takes_the_settings_of_its_recipe_with_the_algorithm():
    folder = "pipelines/diffusion/models/shapes-sd3"
    path = str(Path(__file__).resolve().parents[2] / folder)
    for algorithm, names in ((None, {"shapes-full", "shapes-lora"}), ("diffusion_nft", {"shapes-nft"})):
        found = look_at_model(path, None, edits=False, algorithm=algorithm)
        assert found.like is not None
        assert found.like.same
        assert found.like.name in names


@pytest.mark.slow
def test_adapters_of_a_model_whose_recipe_trains_all_weights_are_told_its_rate(folder):
    path = str(Path(__file__).resolve().parents[2] / "pipelines/llm/models/sums-qwen3")
    flags = ("--model", path, "--data", "questions.csv", "--reward", "answer:number", "--device", "cpu")
    mmrl_init("first.yaml", *flags)
    assert (
        "the shipped recipe sums trains all weights (mmrl init --full) with 1.5e-04" in Path("first.yaml").read_text()
    )
    mmrl_init("full.yaml", *flags, "--full")
    assert load_recipe(["full.yaml"]).recipe.optim.lr == 1.5e-4


def test_columns_are_found_by_their_usual_names_then_by_others(folder):
    found = look_at_data("questions.csv", folder)
    assert found.renamed == {"prompt": "Question", "answer": "Solution"}
    assert found.answers[:2] == ["1", "2"]
    assert found.said[-1] == "for rewards, in sample.prompt.meta: level"
    assert found.options["meta"] == ["level"]
    usual = look_at_data("shown.jsonl", folder)
    assert (usual.renamed, usual.media) == ({}, ["image"])
    named = look_at_data("questions.csv", folder / "below", "Solution", "level")
    assert named.renamed == {"prompt": "Solution", "answer": "level"}
    assert named.options["path"] == "../questions.csv"
    (folder / "empty.csv").write_text("caption,image\na cat,\n")
    assert look_at_data("empty.csv", folder).columns == {"prompt": "caption"}  # nothing is in the other
    (folder / "two.jsonl").write_text('{"x": "a text", "y": "another"}\n')
    with pytest.raises(UnknownColumnError) as error:
        look_at_data("two.jsonl", folder)
    assert error.value.texts == ["x", "y"]


def test_data_without_columns_is_read(folder):
    assert look_at_data("captions.txt", folder).options == {"path": "captions.txt", "heldout": 0.1}
    sums = look_at_data("sums", folder)
    assert (sums.name, sums.options, bool(sums.answers)) == ("sums", {}, True)
    away = look_at_data("nobody/knows-it", folder, "question")
    assert (away.name, away.known, away.renamed) == ("nobody/knows-it", False, {"prompt": "question"})
    with pytest.raises(UserError, match="is no table with columns"):
        look_at_data("sums", folder, "question")


def test_the_usual_reward_compares_where_there_are_answers():
    assert usual_reward(Modality.text, ["so 3 + 4 #### 7", 8]) == "answer:number"
    assert usual_reward(Modality.text, ["7", "seven"]) == "answer:exact"
    assert usual_reward(Modality.text, []) == "reward.py:score"
    assert usual_reward(Modality.pictures, ["7"]) == "reward.py:score"


def test_the_begun_rewards_score_what_they_are_for(tmp_path):
    red, grey = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (128, 128, 128))
    black, white = Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4), "white")
    cases = [
        (Modality.text, True, "text", ["It is 7", "It is 8"], [1.0, 0.0]),
        (Modality.vision_language, False, "text", ["one two", "one one"], [1.0, 0.5]),
        (Modality.pictures, False, "image", [red, grey], [1.0, 0.0]),
        (Modality.clips, False, "video", [(black, white), (black, black)], [1.0, 0.0]),
    ]
    for modality, answers, field, values, wanted in cases:
        file = tmp_path / f"{field}{modality}.py"
        file.write_text(starting_point(modality, ["score"], answers=answers))
        score = mmrl.load("rewards", f"{file}:score")
        prompt = Prompt("p", "what?", {"answer": 7})
        samples = [Sample(prompt, SampleId(0, 0, 0, n), **{field: value}) for n, value in enumerate(values)]
        assert score(samples, context=None) == wanted
        assert score.__mmrl_reward__.inputs == (field,)


def test_the_commands_words_are_those_of_the_planner():
    assert [*get_args(init.Modality)] == [*first_model.Modality]


def test_a_reward_is_named_from_the_recipes_folder(folder):
    (folder / "sub").mkdir()
    assert named_in_recipe("mine.py:score", folder / "sub") == "../mine.py:score"
    assert named_in_recipe("answer:number", folder / "sub") == "answer:number"
    (folder / "sub" / "beside.py").write_text("def score(samples, *, context):\n    return []\n")
    assert named_in_recipe("beside.py", folder / "sub") == "beside.py"
