"""Edits that messages name, made by hand: a test causes the message, makes the edit, and sees the message gone.

For messages that no recipe on the stack causes alone (``tests/support/carried.py``); ``tests/support/carried_table.py``
lists them.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

import transformers  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

from mmrl.api.recipes import Objects, read  # noqa: E402
from mmrl.app.lora_scale import sweep as scaled  # noqa: E402
from mmrl.config.loader import load_recipe  # noqa: E402
from mmrl.controller.features import FeatureStore  # noqa: E402
from mmrl.core.errors import UserError  # noqa: E402
from mmrl.inference import own_class  # noqa: E402
from mmrl.inference.engine_weights import Counted, model_folder  # noqa: E402
from mmrl.inference.weight_groups import WeightGroup  # noqa: E402
from mmrl.planner.fit_check import edits  # noqa: E402
from mmrl.planner.plan import plan  # noqa: E402
from mmrl.report.compare import compare_runs  # noqa: E402
from mmrl.report.curve import curve_picture  # noqa: E402
from mmrl.runtime import start  # noqa: E402
from mmrl.studies.sweep.searching import Search, _value, combinations  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.cli import mmrl as command  # noqa: E402
from tests.support.families import folders  # noqa: E402, F401
from tests.support.families import recipe as family_recipe  # noqa: E402
from tests.support.planning import planned, planned_in_short  # noqa: E402
from tests.support.tiny_diffusion import two_blocks  # noqa: E402

ONE_STEP = [
    *("device=cpu", "train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=4"),
    *("sampling.max_new_tokens=4", "sampling.batch_size=4", "eval.samples=2", "data.train.count=8"),
    *("data.heldout.count=4", "optim.schedule=constant"),
]


def refused(call, words):
    """The message of ``call``, which must have ``words``."""
    with pytest.raises(UserError, match=re.escape(words)) as error:
        call()
    return str(error.value)


# -- Python ----------------------------------------------------------------------------------------------------------


def objects(**given):
    with read("sums", None, Objects(**given)) as loaded:
        return loaded.recipe


def test_heldout_data_come_with_data():
    refused(lambda: objects(heldout=["1+1"]), "heldout: give data too, or set data.heldout of the recipe")
    assert objects(data=["1+1"], heldout=["2+2"]).data
    with read("sums", {"data.heldout": {"count": 5}}, Objects()) as loaded:
        assert loaded.recipe.data.heldout == {"count": 5}


def test_an_algorithm_is_given_as_the_message_writes_it():
    said = refused(lambda: objects(algorithm=3), "algorithm='grpo', or algorithm={'type': 'grpo', 'clip_high': 0.28}")
    assert "algorithm=MyClass" in said
    assert objects(algorithm="grpo").algorithm.type == "grpo"
    assert objects(algorithm={"type": "grpo", "clip_high": 0.28}).algorithm.clip_high == 0.28


def add(a: int, b: int) -> int:
    """Add two numbers.

    a: the first.
    b: the second.
    """
    return a + b


def test_an_environment_is_a_function_or_several():
    refused(lambda: objects(environment=3), "environment: 3 is neither a name, a class nor a function")
    for given in (add, [add]):
        assert Objects(environment=given).changes()


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that evaluates nothing, and one that does."""
    folder = tmp_path_factory.mktemp("runs")
    for name, every in (("blind", "null"), ("seeing", "1")):
        start.train(load_recipe(["sums"], [*ONE_STEP, f"eval.every={every}"]), folder / name)
    return SimpleNamespace(blind=folder / "blind", seeing=folder / "seeing", folder=folder)


@pytest.mark.slow
def test_a_run_that_evaluates_has_samples_a_curve_and_figures(runs):
    for of, words in (
        (lambda run: mmrl.load_run(run).samples(), "set eval.every, or wait for one"),
        (lambda run: compare_runs([run, runs.seeing]), "has no held-out evaluation to compare; set eval.every"),
        (curve_picture, "has no held-out evaluation to draw yet; set eval.every in the recipe"),
        (_value, "has no held-out figure to compare; set eval.rewards, or a reward with a weight"),
    ):
        refused(lambda of=of: of(runs.blind), words)
        if of is not None and "compare;" in words and "evaluation" in words:
            start.train(load_recipe(["sums"], [*ONE_STEP, "eval.every=1", "seed=1"]), runs.folder / "other")
            assert compare_runs([runs.folder / "other", runs.seeing])
        else:
            assert of(runs.seeing) is not None


@pytest.mark.slow
def test_a_run_that_has_ended_goes_on_with_more_steps(tmp_path):
    with mmrl.start("sums", [*ONE_STEP, "eval.every=null"], out=tmp_path / "run") as run:
        while not run.finished:
            run.step()
        refused(run.step, "raise train.steps with mmrl.continue_run")
    assert mmrl.continue_run(tmp_path / "run", ["train.steps=2"]).finished
    assert len(mmrl.load_run(tmp_path / "run").metrics["step"]) == 2


@pytest.mark.slow
def test_a_run_with_an_adapter_is_scaled(runs):
    said = refused(lambda: scaled(runs.blind, [1.0]), "and no adapter could be scaled")
    assert "train with model.lora={rank: 32}" in said
    start.train(load_recipe(["sums"], [*ONE_STEP, "model.lora={rank: 32}"]), runs.folder / "adapter")
    assert len(scaled(runs.folder / "adapter", [1.0])) == 1


@pytest.mark.slow
def test_a_run_that_diverged_goes_on_with_the_edits(tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace("0.0 for _", "float(s.id.sample) for s").replace(", device=True", ""))
    words = ["eval.every=null", "checkpoint.every=1", f"rewards=[{{name: {tmp_path}/own.py:Own}}]"]
    high = [*ONE_STEP, *words, "train.steps=3", "optim.lr=1e30", "sampling.temperature=5", "model.dtype=bfloat16"]
    said = refused(lambda: start.train(load_recipe(["sums"], high), tmp_path / "high"), "lower optim.lr or")
    assert "set model.dtype=float32" in said
    start.train(load_recipe(["sums"], [*high, "optim.lr=1e-5"]), tmp_path / "low")


# -- commands --------------------------------------------------------------------------------------------------------


def test_settings_of_a_recipe_are_written_behind_it(tmp_path, capsys):
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": f"1+{n}", "answer": str(n + 1)}) + "\n" for n in range(20))
    )
    tiny.language_model(tmp_path / "model")
    (tmp_path / "r.yaml").write_text(
        "name: r\npipeline: llm/chat\nmodel: {path: model}\nsampling: {max_new_tokens: 4}\n"
        "data: {name: jsonl, train: {path: nowhere.jsonl}, heldout: {path: questions.jsonl}}\n"
        'rewards: [{name: "answer:exact"}]\nalgorithm: {type: grpo}\n'
        "train: {steps: 1, prompts_per_step: 1, group_size: 2, micro_batch_size: 2}\n"
    )
    assert command("data", "check", str(tmp_path / "r.yaml"), "--options", "path=questions.jsonl") == 2
    assert "--options: a recipe has its own; write settings" in capsys.readouterr().err
    where = tmp_path / "questions.jsonl"
    assert command("data", "check", str(tmp_path / "r.yaml"), f"data.train.path={where}") == 0, capsys.readouterr()


def test_a_simulated_recipe_prunes_no_groups():
    from mmrl.cli.simulate import micro_batches
    from tests.support.midway import AFTER, SMALL

    def count(*more):
        return micro_batches(load_recipe(["shapes-lora"], [*SMALL, AFTER, *more]).recipe, 1)

    refused(count, "add midway=null to the command")
    assert count("midway=null") > 0


def test_enough_prompts_leave_no_device_without_work(capsys, says):
    shape = ["train.group_size=4", "train.micro_batch_size=4", "sampling.batch_size=4"]
    asked = ["simulate", "shapes-judge", *shape, "--devices", "8", "--steps", "2"]
    assert command(*asked, "train.prompts_per_step=4") == 0
    (note,) = (line for line in " ".join(capsys.readouterr().out.split()).split("note: ") if "without work" in line)
    says(f"note: {note}")
    assert command(*asked, "train.prompts_per_step=64") == 0
    assert "without work" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_has_settings_with_values_and_evaluates(tmp_path):
    said = refused(lambda: combinations(["optim.lr"]), "is no setting with values; write --try optim.lr=1e-5,3e-5")
    assert len(combinations([said.partition("write --try ")[2]])) == 2
    words = [*ONE_STEP, "train.steps=8"]

    def search(name, *more):
        return Search(load_recipe(["sums"], [*words, *more]), tmp_path / name, ["optim.lr=1e-5,3e-5"], 2)

    refused(lambda: search("a", "eval.every=null"), "so no trial would be better; set eval.every=10")
    assert search("b", "eval.every=10").recipes


# -- models, engines and adapters ------------------------------------------------------------------------------------


def test_an_engine_is_given_a_whole_folder(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    refused(lambda: model_folder(str(tmp_path / "none"), "vLLM"), "set model.path to a Hugging Face directory, or go")
    refused(lambda: model_folder(str(tmp_path / "file"), "vLLM"), "is no directory; set model.path to a Hugging Face")
    refused(lambda: model_folder(str(tmp_path / "empty"), "vLLM"), "set model.path to a whole Hugging Face directory")
    tiny.language_model(tmp_path / "model")
    assert model_folder(str(tmp_path / "model"), "vLLM") == tmp_path / "model"


def test_a_log_prob_that_is_no_number_comes_of_weights():
    from mmrl.core.rollout_engine import Request
    from mmrl.inference.engine_weights import Allowance, completion

    request, allowance = Request([1], "", 0), Allowance(4, "length", 0)
    wrong = lambda p: completion(request, allowance, [3], [p], "stop", 1, "vLLM")  # noqa: E731
    refused(lambda: wrong(float("nan")), "Look at grad_norm and loss of the last updates, and lower optim.lr")
    assert wrong(-1.0).log_probs == [-1.0]


def test_vllm_takes_an_adapter_of_a_lower_rank():
    from mmrl.inference.vllm import engine_arguments

    take = lambda rank: engine_arguments("m", 64, "auto", 0, 0, rank, {}, cpu=True)  # noqa: E731
    refused(lambda: take(10_000), "lower model.lora.rank")
    assert take(32)["max_lora_rank"] == 32


ENGINE = """
class Alone:
    max_model_len, sleeps = 64, False
    def __init__(self, model, *, max_model_len{more}): ...
    def generate(self, requests, settings): ...
    def update(self, weights): ...
    def update_lora(self, weights, config): ...
    def sleep(self): ...
    def wake(self): ...
    def close(self): ...
"""


def test_an_engine_of_ones_own_takes_the_rank_or_no_adapter(tmp_path, says):
    for name, more in (("old", ""), ("new", ", lora_rank=None")):
        (tmp_path / f"{name}.py").write_text(ENGINE.format(more=more))

    def lacks(name, *words):
        recipe = load_recipe(["sums"], [f"rollout.engine={tmp_path / name}.py:Alone", *words]).recipe
        return [text for text in own_class.problems(recipe) if "lora_rank" in text]

    (said,) = lacks("old", "model.lora={rank: 4}")
    says(said)
    assert not lacks("old")
    assert not lacks("new", "model.lora={rank: 4}")


def test_weights_go_through_files_where_memory_has_no_room():
    from mmrl.inference.weight_files import place_for

    refused(lambda: place_for("shm", 2**60), "or set rollout.weight_transport=files")
    place_for("files", 2**60).rmdir()


class Slow(BaseHTTPRequestHandler):
    def do_POST(self):
        answer = b"{}"
        if self.server.told.wait(5):
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *_):
        pass


class Half(BaseHTTPRequestHandler):
    """A server whose group ends before it has received, and which reads files."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        work, how = self.server.work, asked["kwargs"]
        if asked["method"] == "join_weights":
            work.submit(self._receive, Path(how["meeting"]))
        elif "weights_path" in how:
            self.server.files += sorted(Path(how["weights_path"]).iterdir())
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def _receive(self, meeting):
        group = WeightGroup(meeting, 1, 2, "gloo", torch.device("cpu"), patience=60)
        group.prove()
        next(group.received())
        group.close()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("edit", ["shm", "files"])
def test_weights_whose_connection_breaks_go_through_files(tmp_path, edit):
    from mmrl.inference.server_process import Client, Timeouts
    from mmrl.inference.vllm_server import GroupSender, VllmServer
    from mmrl.inference.weight_files import Room, Sending

    server = ThreadingHTTPServer(("127.0.0.1", 0), Half)
    server.work, server.files = ThreadPoolExecutor(1), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = Client("it", f"http://127.0.0.1:{server.server_port}", timeout_s=60)
    mode = SimpleNamespace(filled=contextlib.nullcontext)
    large = [(f"w{n}", torch.zeros(2**20)) for n in range(8)]
    many = len(large) * 2**20
    try:
        sender = GroupSender(client, tmp_path, Sending(2**20, "gloo"), {}, 1, Timeouts(60, 60))
        send = lambda: sender.send(Counted(iter(large)), many, mode)  # noqa: E731
        refused(send, "through gloo")
        room, sending = Room(4 * many), Sending(2**20, edit)
        one = SimpleNamespace(_room=room, _sending=sending, _dtypes={}, _values=many, _mode=mode, _client=client)
        VllmServer._update_by_files(one, iter(large))
        room.close()
        assert len([file for file in server.files if file.suffix == ".safetensors"]) == 8
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_that_needs_longer_is_waited_for():
    from mmrl.inference.server_process import Client

    server = HTTPServer(("127.0.0.1", 0), Slow)
    server.told = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        refused(lambda: Client("it", url, timeout_s=0.2).post("/x", {}), "raise request_timeout_s, or lower sampling")
        server.told.set()
        assert Client("it", url, timeout_s=60).post("/x", {}) == {}
    finally:
        server.shutdown()
        server.server_close()


def test_a_prompt_that_is_too_long_is_cut_left_out_or_allowed():
    from mmrl.core.trajectory import Prompt
    from mmrl.models.text.overlong import Fitter, Limit, OverlongError
    from tests.support.template_answers import chat_of

    chat, prompt = chat_of(tiny.tokenizer(), tiny.CHATML), Prompt("p", "a b c d e f g h " * 9)
    encode = lambda how, most=40: Fitter(chat, how).encode(prompt, Limit(most, ""))  # noqa: E731
    refused(lambda: encode("error"), "raise the limit, or set data.overlong to skip or cut")
    with pytest.raises(OverlongError):
        encode("skip")
    assert len(encode("cut")[1]["input_ids"]) <= 40
    assert encode("error", 4000)


def test_moments_of_eight_bits_go_on_with_whole_weights():
    """Of a checkpoint that bitsandbytes' own optimizer wrote; weights in parts have the lockstep of shards."""
    pytest.importorskip("bitsandbytes")
    from tests.support.performance import policy, updates

    first, parts, whole = policy("adamw_8bit"), policy(), policy("adamw_8bit")
    updates(first, 0, 2)
    tensors, numbers = first.state()
    saved = {part: {k: t.clone() for k, t in of.items()} for part, of in tensors.items()}
    parts.weights.lockstep = True
    refused(lambda: parts.rooms(saved), "go on with train.backend=replicated")
    rooms = whole.rooms(saved)
    for part, of in saved.items():
        for k, t in of.items():
            rooms[part][k].copy_(t)
    whole.load_state(rooms, numbers)
    assert all(torch.equal(p, whole.trainable[k]) for k, p in first.trainable.items())
    assert load_recipe(["sums"], ["train.backend=replicated", "performance.optimizer=adamw_8bit"])


# -- environments ----------------------------------------------------------------------------------------------------

FIRST = (
    "{% for m in messages %}{% if loop.first or m.role in SHOWN %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""A chat template that shows the first message, and those of some roles."""


def test_answers_of_an_environment_are_shown_in_a_role_of_the_template():
    from mmrl.episodes.world import role_of
    from tests.support.template_answers import chat_of

    def role(asked, *shown, calls=False):
        template = FIRST.replace("SHOWN", json.dumps(shown))
        recipe = load_recipe(["sums"], [f"environment={{name: guess, role: {asked}}}"]).recipe
        return role_of(chat_of(tiny.tokenizer(), template), recipe, calls=calls)

    refused(lambda: role("user", "assistant", "tool"), "; set environment.role to auto")
    assert role("auto", "assistant", "tool") == "tool"
    refused(lambda: role("auto", "assistant"), "; set model.chat_template to one that shows them")
    assert role("auto", "assistant", "user") == role("auto", "assistant", "user", calls=True) == "user"
    assert role("auto", "assistant", "user", "tool") == "user"  # a world speaks as the user
    assert role("auto", "assistant", "user", "tool", calls=True) == "tool"


WORLD = """
class World:
    def __init__(self, mended):
        self.mended = mended
    def reset(self, prompt, seed):
        self.bad = seed % 2
    def step(self, action):
        if self.bad and not self.mended:
            raise ValueError("no")
        return None
"""


@pytest.mark.slow
def test_failed_episodes_are_mended_or_left_out(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)

    def train(name, mended, *more):
        world = f"{{name: '{tmp_path}/world.py:World', options: {{mended: {mended}}}, max_tokens: 90}}"
        words = [*ONE_STEP, "eval.every=null", "train.prompts_per_step=4", f"environment={world}", *more]
        start.train(load_recipe(["sums"], words), tmp_path / name)

    refused(lambda: train("bad", "false"), "set scoring.max_failed above 0.25 to train on the other samples")
    train("mended", "true")
    train("others", "false", "scoring.max_failed=1")


# -- plans -----------------------------------------------------------------------------------------------------------


def has(made, words):
    return [text for text in map(str, [*made.problems, *made.notes]) if words in text]


def test_fewer_devices_or_more_prompts_keep_all_busy(says):
    words = ["device=cpu", "train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=1"]
    edit = "lower devices_per_controller, or raise train.prompts_per_step"
    (said, *_) = has(planned_in_short("shapes-lora", *words, "devices_per_controller=3"), edit)
    says(said)
    assert not has(planned_in_short("shapes-lora", *words, "devices_per_controller=2"), edit)
    more = ["devices_per_controller=3", "train.prompts_per_step=3"]
    assert not has(planned_in_short("shapes-lora", *words, *more), edit)


def test_gpus_of_a_controller_each_get_a_process(says):
    words = ["device=cuda", "devices_per_controller=2", "train.prompts_per_step=1"]
    (said,) = has(planned_in_short("sums", *words), "passes through one process")
    says(said)
    assert "raise train.prompts_per_step and eval.samples to 2 or more, and set controllers=2" in said
    edits = ["train.prompts_per_step=2", "controllers=2", "devices_per_controller=1"]
    assert not has(planned_in_short("sums", *words, *edits), "passes through one process")


OWN = """
import mmrl

@mmrl.reward(inputs=("text",), device=True)
class Own:
    def score(self, samples, *, context):
        return [0.0 for _ in samples]
"""


def test_a_reward_that_can_sleep_is_put_to_sleep(tmp_path, says):
    (tmp_path / "own.py").write_text(OWN)
    moves = "    def sleep(self, device): ...\n    def wake(self, device): ...\n"
    (tmp_path / "sleeper.py").write_text(OWN + moves)
    plan_of = lambda name, sleep: planned_in_short(  # noqa: E731
        "sums", f"placement.sleep={sleep}", f"rewards=[{{name: {tmp_path / name}.py:Own}}]"
    )
    (said,) = has(plan_of("own", "true"), "cannot sleep: give the class sleep(device)")
    says(said)
    assert not has(plan_of("sleeper", "true"), "cannot sleep")
    assert not has(plan_of("own", "false"), "cannot sleep")


def test_a_calibration_without_a_dtype_is_used_in_float32(tmp_path, monkeypatch, says):
    from mmrl.planner.calibration_file import find, keep, key_of
    from tests.support.calibration import EVEN

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = key_of("cpu", 1)
    keep(key, EVEN)
    found, why = find(key, "bfloat16")
    says(why)
    assert found is None
    assert why.endswith("set model.dtype=float32")
    assert find(key, "float32") == (EVEN, "")


def test_a_cpu_and_a_gpu_without_bfloat16_compute_in_float32(monkeypatch, says):
    from mmrl.planner.gpus import GPUS

    def notes(words, gpu):
        from tests.support.planning import without_the_step

        with without_the_step():
            return has(plan(load_recipe(["sums"], words), gpu=gpu), "set model.dtype=float32")

    old = next(gpu for gpu in GPUS.values() if not gpu.bfloat16)
    monkeypatch.setattr("mmrl.planner.plan.has_bfloat16", lambda device: False)
    for gpu in (old, None):
        (said,) = notes(["device=cpu", "model.dtype=bfloat16"], gpu)
        says(said)
        assert not notes(["device=cpu", "model.dtype=float32"], gpu)


def test_a_gradient_is_declared_or_not_followed(tmp_path):
    from mmrl.app.build import build

    (tmp_path / "own.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('tensor',), differentiable=True, per='group')\n"
        "def of_groups(samples, *, context):\n    return [0.0 for _ in samples]\n"
    )
    small = [f"model.path={two_blocks()}", "eval.rewards=[]", "train.micro_batch_size=2", "train.prompts_per_step=2"]
    for name in ("shapes", f"{tmp_path}/own.py:of_groups"):
        words = [*small, f"rewards=[{{name: {name}}}]"]
        assert has(planned_in_short("shapes-draft", *words), "follows the reward's gradient, and ")
        refused(lambda words=words: build(load_recipe(["shapes-draft"], words).recipe), "or algorithm={type: ")
    build(load_recipe(["shapes-draft"], small).recipe)
    other = [*small, "rewards=[{name: shapes}]", "algorithm={type: flow_grpo}", "train.group_size=2"]
    build(load_recipe(["shapes-draft"], other).recipe)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model of experts that takes one for each token."""
    folder = tmp_path_factory.mktemp("experts")
    words = tiny.tokenizer()
    ids = {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 1}
    more = {"head_dim": 8, "max_position_embeddings": 256, "norm_topk_prob": True}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**small, **more, **ids)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def test_experts_that_megatron_does_not_weigh_are_sharded_by_fsdp(experts, says):
    words = [f"model.path={experts}", "device=cpu", "devices_per_controller=2"]
    megatron = ["train.backend=megatron", "train.tensor_parallel=2"]
    (said,) = has(planned_in_short("sums", *words, *megatron), "weighs its experts")
    says(said)
    assert not planned_in_short("sums", *words, "train.backend=fsdp").problems[1:]  # LEFT_OUT


def test_features_that_have_room_are_kept(tmp_path, capsys, says):
    def store(folder, fits):
        kept = FeatureStore(fits * 409, str(folder))
        kept.hold(list("abc"))
        for name in "abc":
            kept.put(name, {"x": torch.zeros(100)})
        return kept

    nowhere = tmp_path / "file"
    for name in ("room", "cleaned"):
        (tmp_path / name).mkdir()
    nowhere.write_text("")
    store(nowhere, 2).close()
    said = capsys.readouterr().err
    says(said)
    assert "set features.folder to a local folder with room, or raise features.budget" in said
    for kept in (store(tmp_path / "room", 2), store(nowhere, 4)):
        assert kept.get("a")["x"].shape == (100,)
        kept.close()
    kept = store(tmp_path / "cleaned", 2)
    next((tmp_path / "cleaned").rglob("*.safetensors")).unlink()
    refused(lambda: kept.get("a"), "that nothing cleans up, or raise features.budget")
    kept.close()
    assert not capsys.readouterr().err


def test_adapters_of_other_programs_and_with_whole_weights(tmp_path, says):
    from safetensors.torch import load_file, save_file

    from mmrl.app.build import build

    pair = {"lora_down.weight": torch.randn(4, 8), "lora_up.weight": torch.randn(8, 4)}
    key = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    save_file({f"{key}.{name}": tensor for name, tensor in pair.items()}, tmp_path / "kohya.safetensors")
    tiny.language_model(tmp_path / "model", tie_word_embeddings=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    get_peft_model(base, lora).save_pretrained(str(tmp_path / "plain"))
    shutil.copytree(tmp_path / "plain", tmp_path / "whole")
    file = tmp_path / "whole" / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.ones(base.lm_head.weight.shape)}, file)
    words = [f"model.path={tmp_path / 'model'}", "device=cpu"]

    def made(*more):
        return build(load_recipe(["sums"], [*words, *more]).recipe)

    refused(lambda: made(f"model.lora={{path: {tmp_path / 'kohya.safetensors'}}}"), "or remove model.lora.path")
    refused(lambda: made(f"model.lora={{path: {tmp_path / 'whole'}}}"), "or remove lora.path, and a new adapter")
    made("model.lora={rank: 4}")
    made(f"model.lora={{path: {tmp_path / 'plain'}}}")
    merged = PeftModel.from_pretrained(base, str(tmp_path / "plain")).merge_and_unload()
    shutil.copytree(tmp_path / "model", tmp_path / "merged")
    merged.save_pretrained(tmp_path / "merged")
    words[0] = f"model.path={tmp_path / 'merged'}"
    made("model.lora={rank: 4}")


def test_noise_levels_of_the_checkpoint_are_taken_by_its_schedule(folders, tmp_path):
    folder = tmp_path / "sana"
    shutil.copytree(folders["sana"], folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_train_timesteps": 500}))
    built = lambda **more: family_recipe("sana", {"sana": folder}, **more)  # noqa: E731
    describe = lambda asked: mmrl.load("pipelines", "diffusion/sana").describe(asked, str(folder), None)  # noqa: E731
    refused(lambda: describe(built()), " (sampling.schedule=checkpoint uses it)")
    assert describe(built(schedule="checkpoint"))


def test_geneval_reads_the_meta_that_data_give(tmp_path, says):
    from mmrl.core.trajectory import Sample, SampleId
    from mmrl.data.loading import load_prompts

    row = {"tag": "single_object", "include": [{"class": "cat", "count": 1}], "exclude": []}
    (tmp_path / "evaluation_metadata.jsonl").write_text(
        "".join(json.dumps(row | {"prompt": f"{n} cats"}) + "\n" for n in range(20))
    )
    module = mmrl.load("rewards", "geneval")
    reward = object.__new__(module.GenEval)
    reward.detector = SimpleNamespace(names={0: "cat"})
    where = f"path: {tmp_path}/evaluation_metadata.jsonl"

    def wanted(more):
        data = f"data={{name: jsonl, train: {{{where}{more}}}, heldout: {{{where}{more}}}}}"
        prompt = load_prompts(load_recipe(["shapes-lora"], [data, "rewards=[{name: shapes}]"]).recipe, "train")[0]
        return reward._wanted(Sample(prompt, SampleId(0, 0, 0, 0), None))

    says(said := wanted("").reason)
    assert "with data.name=jsonl and meta: [tag, include, exclude]" in said
    assert wanted(", meta: [tag, include, exclude]")[0].name == "cat"


@pytest.mark.slow
def test_fewer_processes_or_a_cluster_fit(says):
    words = ["device=cpu", "controllers=4"]
    peak = planned("sums", *words).peak.total
    (said,) = has(planned("sums", *words, device_memory=2 * peak), "or name a cluster (ray=auto or its address)")
    says(said)
    assert said.startswith("controllers: ")
    for edit in ("controllers=1", "ray=auto"):
        assert not has(planned("sums", *words, edit, device_memory=2 * peak), "or name a cluster")


@pytest.mark.slow
def test_what_does_not_fit_is_lowered(says):
    """Each edit lowers that part of a phase which it names."""
    words = ["shapes-judge", "device=cpu", "train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=2"]
    made = planned(*words, device_memory=2**34)
    before = next(one for one in made.phases if one.name == "train")
    told = "; ".join(edits(made, before))
    says(told)
    for change in ("model.lora={rank: 32}", "performance.optimizer=adamw_8bit"):
        assert change in told
        after = next(one for one in planned(*words, change, device_memory=2**34).phases if one.name == "train")
        assert after.parts.get("optimizer state", 0) < before.parts["optimizer state"]


@pytest.mark.slow
def test_engines_and_judges_sleep_or_take_less(says):
    """The plan of each edit has less of them in the phase that was too large."""
    pytest.importorskip("vllm")
    small = ["device=cpu", "train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=2"]
    judged, apart = ["sums-capo", *small, "devices_per_controller=2"], "placement={type: colocate, sleep: true}"
    engine, less = ["sums", *small, "rollout.engine=vllm"], "rollout.options={kv_cache_memory_bytes: 67108864}"
    for words, phase, part, change, names in (
        (judged, "train", "rewards' models", apart, apart),
        (engine, "train", "engine", apart, apart),
        (engine, "sample", "engine", less, "a lower rollout.options.kv_cache_memory_bytes"),
    ):
        before, after = (planned(*words, *more, device_memory=2**34) for more in ((), (change,)))
        was, now = (next(one for one in made.phases if one.name == phase) for made in (before, after))
        told = "; ".join(edits(before, was))
        says(told)
        assert names in told
        assert not after.problems
        assert now.parts.get(part, 0) < was.parts[part] / 2


def test_without_triton_nothing_is_compiled(monkeypatch):
    compiling = mmrl.load("pipelines", "diffusion/loading")
    from mmrl.app.build import build

    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    layer = torch.nn.Linear(2, 2)
    refused(
        lambda: compiling.compile_for_all(layer, torch.device("cuda")),
        "install it, or set performance.compile to false",
    )
    build(load_recipe(["shapes-lora"], ["performance.compile=false", f"model.path={two_blocks()}"]).recipe)


def test_a_tokenizer_gets_a_chat_template(tmp_path):
    tiny.language_model(tmp_path / "model")
    file = tmp_path / "model" / "chat_template.jinja"
    kept = file.read_text()
    file.unlink()
    words = [f"model.path={tmp_path / 'model'}", "device=cpu"]
    assert has(planned_in_short("sums", *words), "or add chat_template.jinja to the directory")
    assert not has(planned_in_short("sums", *words, f"model.chat_template={json.dumps(tiny.CHATML)}"), "chat template")
    file.write_text(kept)
    assert not has(planned_in_short("sums", *words, "seed=1"), "chat template")


# -- processes -------------------------------------------------------------------------------------------------------


def test_a_process_is_waited_for_as_long_as_the_recipe_says(says):
    from mmrl.runtime.heartbeat import HeartbeatMonitor, Processes, whereabouts

    there = Processes({0: whereabouts(), 1: whereabouts() | {"host": "elsewhere", "pid": 1}}, 1, [0])
    silent = lambda patience: HeartbeatMonitor(None, 0, there, patience, None, print)._silent(1, 200.0)  # noqa: E731
    said = silent(120.0)
    says(said)
    assert said.endswith("raise runtime.patience")
    assert silent(300.0) == ""


CONNECT = """
import ray, sys
ray.__version__ = sys.argv[2] or ray.__version__
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.runtime.cluster import cluster
try:
    with cluster(load_recipe(["sums"], ["controllers=2", "ray=" + sys.argv[1]]).recipe):
        print("connected")
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_cluster_is_reached_by_its_address_and_the_same_ray(says):
    """Another version of Ray is one whose number a process takes before it connects."""
    ray = pytest.importorskip("ray")
    from mmrl.runtime.cluster import cluster

    def connected(address, version=""):
        done = subprocess.run([sys.executable, "-c", CONNECT, address, version], capture_output=True, text=True)
        said = done.stdout.strip()
        assert said, done.stderr
        if said != "connected":
            says(said)
        return said

    assert "correct the address, start one (ray start --head)" in connected("127.0.0.1:1")
    with cluster(load_recipe(["sums"], ["controllers=2", "ray=local"]).recipe):
        address = ray.get_runtime_context().gcs_address
        assert "install the same Ray and Python on all nodes, or set ray=local" in connected(address, "0.0.1")
        assert connected(address) == "connected"
