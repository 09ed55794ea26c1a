"""The client of SGLang's server, against a server that follows SGLang's documented requests and answers.

SGLang itself needs a GPU and is not run here. The server of this test answers with a real (tiny, random) model, so that
tokens, log-probs, weights and adapters can be compared; it keeps old keys and values until it is told to flush them, by
refusing to generate.
"""

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.media import Clip
from mmrl.core.rollout_engine import AnswersAsItGoes, Request, Settings
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.inference.engine_weights import values_of
from mmrl.inference.lazy_engine import LazyEngine
from mmrl.inference.sglang import SglangServer, _command
from mmrl.models.policy import Policy

allow_cpu_only()  # before transformers imports torchvision

KEY = "the key"
PROMPT = list(range(5, 25))
END = 3


def language_model(seed):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


class Served(ThreadingHTTPServer):
    """The documented server with ``model``. ``asked`` holds the bodies it was sent, by path."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.adapters, self.stale, self.lock = model, {}, False, threading.Lock()
        self.asked, self.images_are = [], 4
        self.slow, self.broken, self.aborted = (
            set(),
            set(),
            [],
        )  # seeds of requests that wait, and those whose client left meanwhile
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def generate(self, body):
        if self.stale:
            raise ValueError("keys and values of other weights are still cached")
        parameters = body["sampling_params"]
        known = {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "sampling_seed"}
        known |= {"min_new_tokens", "repetition_penalty", "min_p", "stop"}
        if parameters.keys() - known - {"skip_special_tokens"}:
            raise ValueError(f"unexpected {parameters.keys() - known}")
        assert ("input_ids" in body) != ("text" in body)
        images = len(body.get("image_data") or [])
        ids = body.get("input_ids") or [1] * (len(body["text"]) + self.images_are * images)
        model = self.adapters[body["lora_path"]] if "lora_path" in body else self.model
        draw = torch.Generator().manual_seed(parameters.get("sampling_seed", 0))
        entries, finish = [], {"type": "length", "length": parameters["max_new_tokens"]}
        stops = set() if parameters.get("ignore_eos") else {END, *parameters.get("stop_token_ids", ())}
        temperature = parameters["temperature"]
        while len(entries) < parameters["max_new_tokens"]:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            row = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = (row.argmax() if temperature == 0 else torch.multinomial(row.exp(), 1, generator=draw)).item()
            entries.append([row[token].item(), token, None])
            ids = [*ids, token]
            if token in stops:
                finish = {"type": "stop", "matched": token}
                break
        made = len(entries)
        meta = {
            "id": "0",
            "finish_reason": finish,
            "prompt_tokens": len(ids) - made,
            "completion_tokens": made,
            "cached_tokens": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": entries,
        }
        return {"text": "", "output_ids": ids[len(ids) - made :], "meta_info": meta}

    def abort_request(self, body):
        self.aborted.append(body["rid"])
        return ""

    def update_weights_from_disk(self, body):
        folder = Path(body["model_path"])
        if not (folder / "config.json").exists():
            return {"success": False, "message": "no config", "num_paused_requests": 0}
        state = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        self.model.load_state_dict(state)
        self.stale = True
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def load_lora_adapter(self, body):
        if body["lora_name"] in self.adapters:
            return {"success": False, "error_message": f"{body['lora_name']} is already loaded"}
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapters[body["lora_name"]] = merged(self.model, tensors, config["lora_alpha"] / config["r"])
        return {"success": True, "error_message": "", "loaded_adapters": dict.fromkeys(self.adapters, str(folder))}

    def unload_lora_adapter(self, body):
        del self.adapters[body["lora_name"]]
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    def flush_cache(self, body):
        self.stale = False
        return "Cache flushed.\nPlease check backend logs for more details.\n"


class Handler(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self.answer(401, b'{"error": "Unauthorized"}')
        seed, name = body.get("sampling_params", {}).get("sampling_seed"), body.get("rid")
        while seed in self.server.slow and name not in self.server.aborted:
            time.sleep(0.01)
        if seed in self.server.broken:
            self.close_connection = True
            return None
        with self.server.lock:
            self.server.asked.append((self.path, body))
            try:
                said = getattr(self.server, self.path[1:])(body)
            except ValueError as error:
                return self.answer(400, json.dumps({"error": {"message": str(error)}}).encode())
        failed = isinstance(said, dict) and said.get("success") is False
        self.answer(400 if failed else 200, said.encode() if isinstance(said, str) else json.dumps(said).encode())

    def answer(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def merged(model, tensors, scale):
    import copy

    changed = copy.deepcopy(model)
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name in [n for n in tensors if ".lora_A." in n]:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            parameters[target] += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return changed


@pytest.fixture
def folder(tmp_path):
    language_model(0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def served(folder):
    from transformers import Qwen3ForCausalLM

    server = Served(Qwen3ForCausalLM.from_pretrained(folder).eval())
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine(folder, served):
    engine = SglangServer(str(folder), max_model_len=64, lora_rank=8, url=served.url, key=KEY)
    yield engine
    engine.close()
    engine.close()
    assert not engine._private.exists()


def ask(seed=0, prompt=PROMPT, **extra):
    return Request(prompt, "", seed=seed, **extra)


def gap(model, request, answer, temperature=1.0):
    prompt = [*request.prompt_ids, *request.partial]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits / temperature, -1)
    expected = rows.gather(-1, torch.tensor(answer.token_ids).unsqueeze(-1)).squeeze(-1)
    return (expected - torch.tensor(answer.log_probs)).abs().max().item()


def test_tokens_log_probs_and_prompt_counts_come_back(engine):
    requests = [ask(seed, PROMPT[: 8 + seed]) for seed in range(3)]
    answers = engine.generate(requests, Settings(6, temperature=0.7))
    for request, answer in zip(requests, answers, strict=True):
        assert (len(answer.token_ids), answer.finish) == (6, "length")
        assert answer.prompt_tokens == len(request.prompt_ids)
        assert gap(language_model(0), request, answer, 0.7) < 1e-4
        assert gap(language_model(0), request, answer, 1.0) > 0.01
    assert engine.generate([ask(2, PROMPT[:10])], Settings(6, temperature=0.7)) == [answers[2]]


def test_without_seeds_none_is_sent(engine, served):
    engine.generate([ask(None)], Settings(6))
    assert "sampling_seed" not in served.asked[-1][1]["sampling_params"]
    engine.generate([ask(2)], Settings(6))
    assert "sampling_seed" in served.asked[-1][1]["sampling_params"]


def test_cut_and_resumed_is_the_same_as_in_one_go(engine):
    (whole,) = engine.generate([ask()], Settings(9, temperature=0))
    tokens, finishes = [], []
    while not finishes or finishes[-1] == "cut":
        (part,) = engine.generate([ask(partial=tokens)], Settings(9, temperature=0, cut_after=4))
        assert part.prompt_tokens == len(PROMPT)
        tokens = [*tokens, *part.token_ids]
        finishes.append(part.finish)
    assert tokens == whole.token_ids
    assert finishes == ["cut", "cut", "length"]
    assert engine.generate([ask(partial=tokens)], Settings(9))[0].token_ids == []


def test_requests_are_answered_as_they_end_and_one_that_is_cancelled_is_aborted(engine, served):
    assert isinstance(engine, AnswersAsItGoes)
    assert engine.ready(None) == []
    whole, settings = engine.generate([ask(n) for n in range(4)], Settings(6)), Settings(6)
    served.slow |= {1, 2}
    ids = [engine.submit(ask(n, name=f"row {n}"), settings) for n in range(4)]
    found = {}
    while len(found) < 2:
        found |= dict(engine.ready(None))
    assert found == {ids[0]: whole[0], ids[3]: whole[3]}
    assert engine.ready(0.0) == engine.ready(0.05) == []
    weights = language_model(9).state_dict()
    for spoil in (
        lambda: engine.update(iter(weights.items())),
        lambda: engine.update_lora({}, 1, 1.0, []),
        engine.sleep,
        lambda: engine.generate([ask()], settings),
    ):
        with pytest.raises(
            UserError, match=r"SGLang has 2 requests under way \(row 1, row 2\): take .* or cancel them"
        ):
            spoil()
    engine.cancel(ids[1])
    assert len(served.aborted) == 1
    for id in (ids[1], ids[0], 99):
        with pytest.raises(UserError, match=f"SGLang has no request {id} under way"):
            engine.cancel(id)
    served.slow.clear()
    assert engine.ready(None) == [(ids[2], whole[2])]
    assert engine.ready(None) == []
    engine.update(iter(weights.items()))


def test_a_connection_that_breaks_ends_all_requests(engine, served):
    served.slow.add(1)
    served.broken.add(2)
    for n in (1, 2):
        engine.submit(ask(n), Settings(4))
    with pytest.raises(UserError, match=r"the SGLang server could not be asked \(/generate\)"):
        engine.ready(None)
    assert engine.ready(None) == []
    assert len(served.aborted) == 1
    served.slow.clear()
    assert engine.generate([ask(1)], Settings(4))[0].token_ids


def test_stop_tokens(engine, served):
    (whole,) = engine.generate([ask(4)], Settings(12))
    (stopped,) = engine.generate([ask(4)], Settings(12, stop_token_ids=(whole.token_ids[3],)))
    assert stopped.finish == "stop"
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]
    asked = [body["sampling_params"] for _, body in served.asked]
    assert asked[0]["ignore_eos"] is True
    assert "ignore_eos" not in asked[1]  # SGLang would then look at no stop token at all


def test_what_differs_from_its_defaults_is_asked_for(engine, served):
    engine.generate([ask(4)], Settings(3))
    engine.generate(
        [ask(4, partial=[1])], Settings(3, stop=["</a>"], min_new_tokens=2, min_p=0.1, repetition_penalty=1.2)
    )
    plain, asked = [body["sampling_params"] for _, body in served.asked]
    own = {"stop": ["</a>"], "min_new_tokens": 1, "min_p": 0.1, "repetition_penalty": 1.2}
    assert not own.keys() & plain.keys()
    assert {name: asked[name] for name in own} == own


def test_update_brings_every_weight_as_a_whole_directory_and_flushes(engine, served):
    new = language_model(9)
    engine.update(iter(new.state_dict().items()))
    (answer,) = engine.generate([ask()], Settings(6))
    assert gap(new, ask(), answer) < 1e-4
    assert gap(language_model(0), ask(), answer) > 0.5
    assert [path for path, _ in served.asked] == ["/update_weights_from_disk", "/flush_cache", "/generate"]
    assert served.asked[0][1]["flush_cache"] is True
    assert list(engine._private.iterdir()) == []
    served.asked.clear()
    with pytest.raises(UserError, match=r"brought [\d,]+ values"):
        engine.update((k, v) for k, v in new.state_dict().items() if "embed" not in k)
    assert served.asked == []  # nothing was replaced


def test_an_adapter_is_replaced_under_a_new_name(engine, served):
    for seed in (1, 2):
        draw = torch.Generator().manual_seed(seed)
        name = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
        tensors = {name.format("A"): torch.randn(4, 32, generator=draw), name.format("B"): torch.ones(32, 4)}
        engine.update_lora(tensors, rank=4, alpha=2.0, targets=["q_proj"])
        (answer,) = engine.generate([ask()], Settings(6))
        assert gap(merged(language_model(0), tensors, 0.5), ask(), answer) < 1e-4
        assert gap(language_model(0), ask(), answer) > 0.01
        assert len(served.adapters) == 1
    assert [p.name for p in engine._private.iterdir()] == list(served.adapters)
    with pytest.raises(UserError, match="for adapters of rank 8 at most; start it with lora_rank=9"):
        engine.update_lora(tensors, rank=9, alpha=2.0, targets=["q_proj"])


def test_pictures_are_sent_whole_and_counted(engine, served):
    picture = Image.new("RGB", (4, 4), (200, 10, 30))
    text = "what is it?"
    request = Request([1] * (len(text) + 4), text, seed=0, media=[picture], name="scenes/2")
    (answer,) = engine.generate([request], Settings(4))
    assert answer.prompt_tokens == len(request.prompt_ids)
    sent = served.asked[0][1]
    assert sent["text"] == text
    assert "input_ids" not in sent
    assert sent["image_data"][0].startswith("data:image/png;base64,")
    served.images_are = 9
    with pytest.raises(UserError, match=r"SGLang made 20 tokens .* scenes/2 .* trainer's processor 15"):
        engine.generate([request], Settings(4))
    for extra, what in (
        ({"partial": [1]}, "continues tokens"),
        ({"media": [picture, Clip([picture], 1.0, [0], 1)]}, "has a clip"),
        ({"text": ""}, "has pictures and has sampled turns before the last, which SGLang's server cannot be asked for"),
    ):
        with pytest.raises(UserError, match=what):
            engine.generate([replace(request, **extra)], Settings(4))


def test_sleep_is_asked_for_only_where_it_was_switched_on(folder, served, engine):
    engine.sleep()
    engine.wake()
    assert served.asked == []
    served.release_memory_occupation = served.resume_memory_occupation = lambda body: {}
    saver = SglangServer(str(folder), max_model_len=64, url=served.url, key=KEY, options={"enable_memory_saver": True})
    saver.sleep()
    saver.wake()
    assert [path for path, _ in served.asked] == ["/release_memory_occupation", "/resume_memory_occupation"]
    saver.close()


def test_on_standby_it_is_there_when_it_is_asked_and_sleeps_where_it_can(folder, served):
    served.release_memory_occupation = served.resume_memory_occupation = lambda body: {}
    started = []

    def start(**options):
        def made():
            started.append(SglangServer(str(folder), max_model_len=64, url=served.url, key=KEY, options=options))
            return started[-1]

        return LazyEngine(made, to_sleep=True)

    saver = start(enable_memory_saver=True)
    saver.sleep()
    assert started == []
    (first,) = saver.generate([ask()], Settings(4, temperature=0))
    saver.sleep()
    saver.sleep()
    assert saver.wake() is False
    assert saver.generate([ask()], Settings(4, temperature=0))[0].token_ids == first.token_ids
    paths = [path for path, _ in served.asked]
    assert paths == ["/generate", "/release_memory_occupation", "/resume_memory_occupation", "/generate"]
    assert len(started) == 1
    saver.close()
    assert saver.wake() is True  # started for good: this says nothing of what the next waking takes
    other = start()
    assert other.wake() is False  # each waking is a start
    other.sleep()
    assert other.generate([ask()], Settings(4, temperature=0))[0].token_ids == first.token_ids
    assert len(started) == 4
    for engine in (saver, other):
        engine.close()


def test_what_slept_gets_the_present_weights_again(folder, served):
    served.release_memory_occupation = served.resume_memory_occupation = lambda body: {}
    options = {"enable_memory_saver": True}
    engine = LazyEngine(
        lambda: SglangServer(str(folder), max_model_len=64, url=served.url, key=KEY, options=options), to_sleep=True
    )
    recipe = load_recipe(["sums"]).recipe
    policy = Policy(language_model(1), recipe.optim, 1)
    conditioner = SimpleNamespace(forbidden=(), frame=None)
    pipeline = LanguagePipeline(conditioner, policy.module, recipe, torch.device("cpu"), engine)  # type: ignore[arg-type]

    def sent():
        return [path for path, _ in served.asked].count("/update_weights_from_disk")

    for _ in range(2):
        pipeline.sync(policy)
    assert sent() == 1
    pipeline.sleep()
    pipeline.wake()
    pipeline.sync(policy)
    assert sent() == 2
    given = pipeline.updates()
    assert (given["perf/engine_updates"], given["perf/engine_update_bytes"]) == (2, 2 * 4 * values_of(folder))
    assert given["perf/engine_update_seconds"] > 0
    pipeline.close()


def test_what_cannot_work_says_so(folder, served, engine, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="there is no model directory"):
        SglangServer(str(tmp_path / "none"), max_model_len=8)
    with pytest.raises(UserError, match="must be https, or http on the loopback interface"):
        SglangServer(str(folder), max_model_len=8, url="http://10.0.0.1:30000")
    with pytest.raises(UserError, match=r"no SGLang server answers at http://127\.0\.0\.1:9/health"):
        SglangServer(str(folder), max_model_len=8, url="http://127.0.0.1:9")
    other = SglangServer(str(folder), max_model_len=64, url=served.url, key="another")
    with pytest.raises(UserError, match="refused /generate with status 401: Unauthorized"):
        other.generate([ask()], Settings(4))
    with pytest.raises(UserError, match="1 of 1 prompts do not fit the engine's context of 64 tokens"):
        engine.generate([ask(prompt=[1] * 64)], Settings(4))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="SGLang is not installed"):
        SglangServer(str(folder), max_model_len=8)


def test_the_command_of_a_server_of_ours():
    made = " ".join(_command("/m", 30001, 64, "bfloat16", 16, {"tp_size": 2, "disable_radix_cache": False}))
    assert "-m sglang.launch_server --model-path /m --host 127.0.0.1 --port 30001 --dtype bfloat16" in made
    assert "--context-length 64 --sampling-defaults openai" in made
    assert "--enable-deterministic-inference --enable-lora --max-lora-rank 16 --lora-target-modules all" in made
    assert made.endswith("--tp-size 2")
    with pytest.raises(UserError, match="engine options: api_key, host: set by the recipe's other keys"):
        _command("/m", 1, 64, "auto", None, {"host": "0.0.0.0", "api_key": "x"})
