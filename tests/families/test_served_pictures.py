"""Pictures that SGLang's diffusion server samples: requests, answers, rows and refusals.

Most tests put a stand-in in the place of the server, which denoises with the policy itself and answers in the server's
shapes. One runs SGLang, where ``MMRL_SGLANG_PYTHON`` names the python of an environment that has it.
"""

import json
import os
import re
import struct
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from mmrl.algorithms import sde
from mmrl.config.checks import impossibilities
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, LostServerError, UserError
from mmrl.inference import picture_server, this_machine
from mmrl.inference.picture_server import PictureServer, drawn
from mmrl.inference.weight_files import Sending
from mmrl.models.merging import merged_weights
from mmrl.pipelines.diffusion.contract import Case
from mmrl.pipelines.diffusion.packed import packed
from mmrl.pipelines.diffusion.served import trained_weights
from tests.support import tiny_diffusion
from tests.support.families import folders, recipe  # noqa: F401  (a fixture)

PYTHON = "MMRL_SGLANG_PYTHON"


def served(family, folders, lora=True, **changes):
    made = recipe(family, folders, lora, guidance_scale=3.0, **changes.pop("sampling", {}))
    rollout = {"engine": "sglang", **changes.pop("rollout", {})}
    return Recipe.model_validate(made.model_dump(exclude_unset=True) | {"rollout": rollout} | changes)


class StandIn:
    """Denoises under the weights that ``case`` has. ``wrong``: what it does otherwise."""

    def __init__(self, case, wrong=""):
        self.case, self.wrong, self.asked, self.sent, self.closed = case, wrong, [], [], 0

    def update(self, weights, need):
        sent = dict(weights)
        assert sum(4 * t.numel() for t in sent.values()) <= need
        self.sent.append(sent)

    def ask(self, bodies):
        self.asked += bodies
        if self.wrong == "lost":
            self.wrong = ""
            raise LostServerError("it is gone")
        return [self.draw(body) for body in bodies]

    def draw(self, body):
        pipeline = self.case.pipeline
        slot = next(slot for slot in self.case.slots if slot.prompt.text == body["prompt"])
        schedule, features = pipeline.adapter.schedule(body["num_inference_steps"]), pipeline.batch_features([slot])
        noisy, generator = body["rollout_sde_step_indices"], torch.Generator().manual_seed(body["seed"])
        kind = {"sde": "flow", "cps": "cps"}[body["rollout_sde_type"]]
        c = sde.coefficients(schedule.sigmas, kind, body["rollout_noise_level"], noisy)
        x = torch.randn((1, *pipeline.shape), generator=generator)
        states, log_probs, velocities = [x], [], []
        for i in range(len(c.std)):
            v = pipeline.velocity(x, schedule.timesteps[i].expand(1), features)
            v = 1.2 * v if self.wrong == "velocities" else v
            mean = sde.step_mean(x, v, c, i)
            x = mean + c.std[i] * torch.randn(x.shape, generator=generator)
            log_probs.append(sde.log_prob(x, mean, c, i) if i in noisy else torch.zeros(1))
            states.append(x)
            velocities.append(v)
        lay = packed if type(pipeline.adapter).__name__.startswith("Qwen") else (lambda t: t.unsqueeze(2))
        latents, velocities = (lay(torch.cat(some)) for some in (states, velocities))
        return picture_server.Drawn(
            latents[..., :-1] if self.wrong == "shapes" else latents,
            schedule.sigmas + (0.01 if self.wrong == "levels" else 0),
            torch.cat(log_probs) + (0.2 if self.wrong == "log-probs" else 0),
            velocities if body["rollout_debug_mode"] else None,
        )

    def close(self):
        self.closed += 1


def sampled(made, monkeypatch, wrong=""):
    """A case whose server is a stand-in, and its first sample."""
    case = Case(made)
    case.push()
    engine = case.pipeline.served
    stand_in = StandIn(case, wrong)
    monkeypatch.setattr(engine, "_start", lambda: stand_in)
    case.pipeline.sync(case.policy)
    return case, stand_in, lambda: case.pipeline.sample(case.slots, case.ids, case.pipeline.noisy_steps(0), seed=3)


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("z_image", {"window": {"size": 1}}),
        ("qwen_image", {"sde": {"kind": "cps"}, "max_sequence_length": 256}),
    ],
)
def test_samples_of_the_server_are_rows_that_train(family, sampling, folders, monkeypatch):
    case, server, sample = sampled(served(family, folders, sampling=sampling), monkeypatch)
    rows = sample()
    actions = rows.actions.tolist()
    for n in range(len(actions)):
        new = case.pipeline.replay(rows, [n], frozenset({"log_probs"}), case.policy.using)["log_probs"]
        assert torch.equal(new.detach()[:, 0], rows.log_probs[:, n])  # the first ratio is 1
    again = [server.draw(body).latents[-1] for body in server.asked]
    clean = rows.clean if family == "z_image" else packed(rows.clean)
    torch.testing.assert_close(torch.stack(again).view_as(clean), clean, atol=1e-5, rtol=1e-5)
    assert len({body["seed"] for body in server.asked}) == len(case.ids)
    assert [body["rollout_debug_mode"] for body in server.asked] == [True, False, False, False]
    assert case.pipeline.updates()["engine/velocity_gap"] < 1e-5
    assert case.pipeline.updates()["engine/log_prob_gap"] < 1e-5
    sample()
    assert len(server.sent) == 1  # the weights are the same
    case.policy.updates += 1
    sample()
    assert len(server.sent) == 2
    assert case.pipeline.updates()["perf/engine_updates"] == 2
    case.pipeline.close()
    assert server.closed == 1


def test_an_evaluation_samples_in_this_process_and_a_forward_process_without_noise(folders, monkeypatch):
    case, server, _ = sampled(served("z_image", folders), monkeypatch)
    case.pipeline.sample(case.slots, case.ids, [], seed=3, evaluate=True)
    assert server.asked == []
    rows = case.pipeline.sample(case.slots, case.ids, [], seed=3)
    assert rows.states is None
    assert rows.log_probs is None
    assert case.pipeline.updates()["engine/velocity_gap"] < 1e-5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("velocities", "rollout.max_gap: velocities of SGLang .* are 0.2 apart"),
        ("log-probs", "rollout.max_gap: log-probs of SGLang"),
        ("levels", "SGLang samples at the noise levels 1.01"),
        ("shapes", "SGLang's states have the shape"),
    ],
)
def test_a_server_that_samples_something_else_ends_the_run(wrong, said, folders, monkeypatch):
    *_, sample = sampled(served("z_image", folders), monkeypatch, wrong)
    with pytest.raises(UserError, match=said):
        sample()
    if wrong == "velocities":  # the edits of the messages
        *_, sample = sampled(served("z_image", folders, rollout={"max_gap": None}), monkeypatch, wrong)
        sample()
        case = Case(recipe("z_image", folders))
        assert case.pipeline.served is None
        case.pipeline.sample(case.slots, case.ids, [0], seed=3)


def test_a_server_that_is_lost_is_started_again_with_the_weights(folders, monkeypatch):
    _, server, sample = sampled(served("z_image", folders), monkeypatch, "lost")
    sample()
    assert server.closed == 1
    assert len(server.sent) == 2
    assert server.asked[4]["rollout_debug_mode"]


def test_a_prompt_that_would_be_cut_elsewhere_is_refused(folders, monkeypatch):
    *_, sample = sampled(served("z_image", folders, sampling={"max_sequence_length": 32}), monkeypatch)
    with pytest.raises(UserError, match="text encoder reads 32, and SGLang cuts it elsewhere"):
        sample()
    with pytest.raises(BadPromptError, match=r"data.overlong: skip"):  # the edit of the message
        Case(
            served(
                "z_image", folders, sampling={"max_sequence_length": 32}, data={"name": "shapes", "overlong": "skip"}
            )
        )


def test_weights_are_sent_as_the_plain_model_has_them(folders):
    case = Case(served("z_image", folders))
    case.push()
    sent = dict(trained_weights(case.pipeline.policy))
    plain = merged_weights(case.pipeline.policy.get_base_model())
    changed = {name for name in plain if name.removesuffix(".weight") in {n.removesuffix(".weight") for n in sent}}
    assert changed == set(sent)
    assert all(torch.equal(plain[name], sent[name]) for name in sent)
    assert {name.split(".")[-2] for name in sent} >= {"to_q", "w1", "0"}
    case = Case(served("z_image", folders, lora=False))
    assert (
        dict(trained_weights(case.pipeline.policy)).keys()
        == dict(case.pipeline.adapter.model.named_parameters()).keys()
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline": "diffusion/sd3"}, "SGLang samples pictures of diffusion/z_image and diffusion/qwen_image here"),
        ({"rollout": {"engine": "vllm_server"}}, "rollout.engine: vllm_server samples text"),
        ({"rollout": {"engine": "sglang", "importance": "token"}}, "rollout.importance: it is for sampled text"),
        ({"algorithm": {"type": "grpo_guard"}}, "set algorithm.type to flow_grpo"),
        ({"algorithm": {"type": "refl"}}, "refl samples nothing with an engine"),
        ({"controllers": 2}, "for one controller with one device"),
        ({"sampling": {"sde": {"kind": "dance"}}}, "sampling.sde.kind: .* set it to flow or cps"),
        ({"sampling": {"solver": "dpmsolver++"}}, "sampling.solver: .* set it to euler"),
        ({"sampling": {"same_initial_noise": True}}, "sampling.same_initial_noise: .* set it to false"),
        ({"model": {"path": "x", "lora": {"rank": 4}, "quantize": "int8"}}, "model.quantize: sglang would sample"),
    ],
)
def test_what_the_server_does_not_sample_is_refused(changes, said):
    base = {"name": "t", "pipeline": "diffusion/z_image", "model": {"path": "x"}, "data": {"name": "shapes"}}
    base |= {"rewards": [{"name": "shapes"}], "algorithm": {"type": "flow_grpo"}, "rollout": {"engine": "sglang"}}
    base |= {"train": {"steps": 1, "prompts_per_step": 2, "group_size": 4}}
    sampling = {"steps": 4, "height": 32, "width": 32} | changes.pop("sampling", {})
    made = Recipe.model_validate(base | {"sampling": sampling} | changes)
    lines = impossibilities(made)
    assert any(re.search(said, line) for line in lines), lines


def test_a_python_that_is_not_there_is_refused(tmp_path):
    options = {"python": str(tmp_path / "python")}
    rollout = SimpleNamespace(engine="sglang", options=options)
    made = SimpleNamespace(rollout=rollout, sampling=SimpleNamespace(type="diffusion"))
    with pytest.raises(UserError, match=r"rollout.options.python: .* is no program here"):
        this_machine.check_engine(made)
    (tmp_path / "python").touch(mode=0o700)
    this_machine.check_engine(made)


def test_a_server_elsewhere_has_https(tmp_path):
    with pytest.raises(UserError, match="must be https"):
        PictureServer("m", "Z-Image", "float32", python="", options={}, url="http://example.com", **_timeouts())


def _timeouts():
    return {"timeouts": picture_server.Timeouts(), "sending": Sending()}


# -- answers -----------------------------------------------------------------------------------------------------------


def pack(value):
    """MessagePack, written by its specification."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return struct.pack("b", value) if -32 <= value < 128 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 + len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])) + data
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, torch.Tensor):
        return pack({"__tensor__": True, "data": save({"t": value}), "shape": list(value.shape)})
    if isinstance(value, list):
        return bytes([0x90 + len(value)]) + b"".join(map(pack, value))
    return b"\xde" + struct.pack(">H", len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())


def answer(**changes):
    trajectory = {"latents": torch.ones(3, 4), "timesteps": None, "sigmas": torch.tensor([1.0, 0.5, 0.0])}
    one = {"request_id": "x" * 40, "seed": 2**40, "time": 0.5, "minus": -3, "dit_trajectory": trajectory}
    return pack([one | {"rollout_log_probs": torch.zeros(2), "rollout_debug_tensors": None} | changes])


def test_an_answer_is_read_without_running_anything():
    made = drawn(answer(rollout_debug_tensors={"rollout_model_outputs": torch.full((2, 4), 2.0)}))
    assert made.latents.shape == (3, 4)
    assert made.sigmas.tolist() == [1.0, 0.5, 0.0]
    assert made.velocities.sum() == 16
    assert drawn(answer()).velocities is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"detail": "no"}, "it is no MessagePack"),
        (answer()[:-5], "is cut"),
        (answer() + b"\xc0", "bytes are left"),
        (answer(rollout_log_probs=None), "something else than a tensor"),
        (answer(rollout_log_probs=torch.tensor([0.0, torch.nan])), "not finite"),
        (answer(rollout_log_probs=torch.zeros(3)), "3 states and 3 log-probs"),
        (answer(rollout_log_probs={"__tensor__": True, "data": b"\x80\x04pickle"}), "no safetensors"),
        (pack([]), "no dit_trajectory"),
        (b"\x91" * 40, "nested too deeply"),
        (b"\xc7\x01\x05x", "the type 0xc7"),
        (b"\x81\x90\xc0", "unhashable"),
    ],
)
def test_an_answer_that_cannot_be_used_says_why(data, said):
    with pytest.raises(UserError, match=said):
        drawn(data)


# -- SGLang itself -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no python with SGLang")
@pytest.mark.timeout(900)
def test_sglang_samples_what_trains_before_and_after_new_weights(tmp_path):
    folder = tiny_diffusion.save("z_image_served", tmp_path / "model")
    config = folder / "transformer" / "config.json"  # SGLang reads these two keys, diffusers two others
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 2, "num_attention_heads": 2}))
    options = {"python": os.environ[PYTHON], "start_timeout_s": 800}
    made = served("z_image", {"z_image": folder}, rollout={"options": options}, sampling={"steps": 4})
    case = Case(made)
    case.pipeline.sync(case.policy)
    try:
        pixels = []
        for _ in range(2):
            rows = case.pipeline.sample(case.slots, case.ids, case.pipeline.noisy_steps(0), seed=3)
            pixels.append(case.pipeline.images(rows))
            gaps = case.pipeline.updates()
            print({name: gap for name, gap in gaps.items() if name.startswith("engine/")})
            assert gaps["engine/velocity_gap"] < 1e-5
            assert gaps["engine/log_prob_gap"] < 1e-5
            case.push()
            case.policy.updates += 1
        assert (pixels[0] - pixels[1]).abs().max() > 1e-3  # the new weights sampled
    finally:
        case.pipeline.close()
