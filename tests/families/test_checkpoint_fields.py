"""Fields of a checkpoint that change its pictures: what is accepted draws diffusers' own picture, the rest is refused
before a weight is read."""

import inspect
import itertools
import json
import os
import random
import shutil
import warnings

import pytest
import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.families import EDITORS, FAMILIES, folders, recipe  # noqa: F401

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402

UNETS = ("sd", "sdxl")
SOLVED = ("sana", "wan")
TRAINED = {"sd": "unet", "sdxl": "unet"}
CLOSE = 1e-3
TIMES = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

FLOW_FIELDS = {
    "shift": [1.0, 2.0, 6.0],
    "use_dynamic_shifting": [True, False],
    "base_shift": [0.2],
    "max_shift": [0.8],
    "base_image_seq_len": [64],
    "max_image_seq_len": [1024],
    "invert_sigmas": [True],
    "shift_terminal": [0.1],
    "use_karras_sigmas": [True],
    "use_exponential_sigmas": [True],
    "use_beta_sigmas": [True],
    "time_shift_type": ["linear"],
    "stochastic_sampling": [True],
    "num_train_timesteps": [500],
}
SOLVERS = {
    "DDIMScheduler": {"clip_sample": [True], "set_alpha_to_one": [True, False], "thresholding": [True]},
    "DDPMScheduler": {"variance_type": ["learned"], "clip_sample": [True]},
    "PNDMScheduler": {"skip_prk_steps": [False], "set_alpha_to_one": [True]},
    "LMSDiscreteScheduler": {},
    "EulerDiscreteScheduler": {
        "interpolation_type": ["log_linear"],
        "sigma_max": [5.0],
        "timestep_type": ["continuous"],
        "final_sigmas_type": ["sigma_min"],
    },
    "EulerAncestralDiscreteScheduler": {},
    "HeunDiscreteScheduler": {},
    "KDPM2DiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {
        "solver_order": [1, 3],
        "algorithm_type": ["sde-dpmsolver++"],
        "use_lu_lambdas": [True],
        "use_flow_sigmas": [True],
        "lambda_min_clipped": [-5.1],
        "variance_type": ["learned_range"],
        "thresholding": [True],
        "euler_at_final": [True],
    },
    "DPMSolverSinglestepScheduler": {},
    "DEISMultistepScheduler": {"solver_order": [1]},
    "UniPCMultistepScheduler": {"solver_type": ["bh1"], "sigma_min": [0.1]},
    "LCMScheduler": {},
    "TCDScheduler": {},
    "EDMEulerScheduler": {},
    "FlowMatchEulerDiscreteScheduler": {},
}
NOISE_FIELDS = {
    "prediction_type": ["v_prediction", "sample", "flow_prediction"],
    "beta_schedule": ["linear", "squaredcos_cap_v2"],
    "beta_end": [0.02],
    "trained_betas": [[0.001] * 100, [0.001 + 1e-5 * n for n in range(1000)]],
    "rescale_betas_zero_snr": [True],
    "timestep_spacing": ["trailing", "linspace", "leading"],
    "steps_offset": [0, 2],
    "num_train_timesteps": [500],
    "use_karras_sigmas": [True],
    "use_beta_sigmas": [True],
}
VAE_FIELDS = {
    "scaling_factor": [0.5, 0.0, None, "a", float("nan")],
    "shift_factor": [0.2, None, "a"],
    "latents_mean": [[0.3, -0.1, 0.2, 0.1], [0.1], None],
    "latents_std": [[0.5, 2.0, 1.5, 0.9], [0.0, 1.0, 1.0, 1.0], [2.0], None],
    "force_upcast": [False],
    "batch_norm_eps": [0.1],
}
MODEL_FIELDS = {
    "in_channels": [8, 9],
    "out_channels": [8],
    "guidance_embeds": [True, False],
    "guidance_embeds_scale": [0.5],
    "timestep_scale": [0.001],
    "time_cond_proj_dim": [16],
    "class_embed_type": ["timestep", "identity"],
    "num_class_embeds": [4],
    "addition_embed_type": ["text", "text_time", "image"],
    "encoder_hid_dim": [32],
    "encoder_hid_dim_type": ["text_proj", "image_proj"],
    "cross_attention_dim": [48, 64],
    "joint_attention_dim": [48],
    "pooled_projection_dim": [48],
    "caption_channels": [48],
    "cap_feat_dim": [48],
    "text_dim": [48],
    "center_input_sample": [True],
    "flip_sin_to_cos": [False],
    "freq_shift": [1],
    "only_cross_attention": [True],
    "upcast_attention": [True],
    "use_linear_projection": [True],
    "resnet_time_scale_shift": ["scale_shift"],
    "time_embedding_type": ["fourier"],
    "class_embeddings_concat": [True],
    "zero_cond_t": [True],
    "use_additional_t_cond": [True],
    "use_layer3d_rope": [True],
    "image_dim": [16],
    "added_kv_proj_dim": [24],
    "pos_embed_seq_len": [8],
    "cross_attn_norm": [False],
    "patch_size": [1, 2],
    "qk_norm": ["rms_norm", "rms_norm_across_heads"],
    "siglip_feat_dim": [16],
    "t_scale": [500.0],
    "rope_theta": [100],
    "dual_attention_layers": [[0]],
    "sample_size": [4, 32],
    "attention_type": ["gated"],
}
BETWEEN = {
    "_class_name": [
        "DDIMScheduler",
        "DDPMScheduler",
        "PNDMScheduler",
        "LMSDiscreteScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "DEISMultistepScheduler",
        "UniPCMultistepScheduler",
    ],
    "prediction_type": [None, "epsilon", "v_prediction", "sample"],
    "timestep_spacing": [None, "leading", "trailing", "linspace"],
    "rescale_betas_zero_snr": [None, False, True],
    "steps_offset": [None, 0, 1, 3],
    "set_alpha_to_one": [None, False, True],
    "clip_sample": [None, False, True],
}
"""Fields of a scheduler that depend on each other; None: not written."""
INDEX_FIELDS = {
    "is_distilled": [True],
    "force_zeros_for_empty_prompt": [True, False],
    "boundary_ratio": [0.9],
    "expand_timesteps": [True],
    "requires_safety_checker": [True],
}


def cases(family):
    """Changes by file: ``{component or "model_index": {field: value}}``."""
    model = TRAINED.get(family, "transformer")
    for fields, where in ((VAE_FIELDS, "vae"), (MODEL_FIELDS, model), (INDEX_FIELDS, "model_index")):
        yield from ({where: {name: value}} for name, values in fields.items() for value in values)
    yield {"vae": {"latents_mean": [0.3, -0.1, 0.2, 0.1], "latents_std": [0.5, 2.0, 1.5, 0.9]}}
    yield {model: {"encoder_hid_dim": 32, "encoder_hid_dim_type": "text_proj"}}
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    for name, values in FLOW_FIELDS.items() if family not in UNETS else ():
        for value in values:
            yield {"scheduler": {name: value}}
            if family in SOLVED:
                yield {"scheduler": flow | {name: value}}
    if family not in UNETS:
        more = {"use_dynamic_shifting": True, "max_image_seq_len": 2048, "shift_terminal": 0.05}
        yield {"scheduler": more | {"time_shift_type": "linear"}}
        yield {"scheduler": more | {"use_karras_sigmas": True}}
    for kind, fields in SOLVERS.items():
        if family in UNETS:
            whole = TIMES | {"_class_name": kind, "timestep_spacing": "leading", "steps_offset": 1}
            bare = {"_class_name": kind}
        else:
            whole = {"_class_name": kind, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
            whole, bare = whole | {"flow_shift": 3.0}, {"_class_name": kind}
        yield {"scheduler": whole}
        yield {"scheduler": bare}
        if family not in (*UNETS, *SOLVED):
            continue  # of another class than a flow's, whatever it says
        for name, values in (fields | NOISE_FIELDS).items():
            for value in values:
                yield {"scheduler": whole | {name: value}}


def changed(folder, made, change):
    """A copy of the checkpoint ``folder`` with changed fields, or None where diffusers cannot make such a model."""
    import diffusers

    shutil.copytree(folder, made, copy_function=os.link)
    for where, fields in change.items():
        file = made / {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}.get(
            where, f"{where}/config.json"
        )
        values = json.loads(file.read_text())
        if where == "scheduler" and "_class_name" in fields:
            values = {}
            index = json.loads((made / "model_index.json").read_text())
            index["scheduler"] = ["diffusers", fields["_class_name"]]
            (made / "model_index.json").unlink()
            (made / "model_index.json").write_text(json.dumps(index))
        file.unlink()
        file.write_text(json.dumps(values | fields))
        if where in ("unet", "transformer"):
            if not set(fields) <= set(values):
                return None
            torch.manual_seed(0)
            try:
                model = getattr(diffusers, values["_class_name"]).from_config(json.loads(file.read_text()))
            except Exception:
                return None
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim >= 2:
                        p.add_(0.02 * torch.randn_like(p))
            for weights in (made / where).glob("*.safetensors"):
                weights.unlink()
            model.save_pretrained(made / where)
    return made


def stock(family, adapter, folder):
    """diffusers' own pipeline, its solver replaced as an export's model card says, where it is another."""
    import diffusers

    pipe = getattr(diffusers, adapter.pipeline).from_pretrained(folder, torch_dtype=torch.float32, **adapter.options)
    own = pipe.scheduler
    if type(own).__name__ not in ("DDIMScheduler", "FlowMatchEulerDiscreteScheduler"):
        exec(adapter.prepare, {"pipe": pipe})
    return pipe


def wrong(family, folder, steps=2):
    """What is wrong with how the checkpoint is treated; empty if it is refused, or drawn as diffusers draws it."""
    asked = recipe(family, {family: folder}, guidance_scale=2.0, steps=steps, lora=False)
    module = mmrl.load("pipelines", f"diffusion/{family}")
    try:
        module.describe(asked, str(folder), None)
    except UserError:
        try:
            module.build(asked, str(folder), torch.device("cpu"))
        except UserError:
            return ""
        return "plan refuses what train takes"
    except Exception as error:
        return f"plan fails with {type(error).__name__}: {error}"
    try:
        case = contract.Case(asked)
        ours = case.drawn()
    except Exception as error:
        return f"plan accepts it, train fails with {type(error).__name__}: {error}"
    try:
        theirs = case.stock(stock(family, case.pipeline.adapter, folder))
    except Exception as error:
        return f"diffusers cannot draw it: {type(error).__name__}: {error}"
    gap = (ours - theirs).abs().max().item()
    return "" if gap < CLOSE else f"pixels differ by {gap:.2g}"


@pytest.mark.slow
@pytest.mark.sweep("fields of checkpoints that change pictures")
def test_what_is_accepted_draws_diffusers_picture(folders, tmp_path, sweep):
    drawn = [(family, change) for family in FAMILIES if family not in EDITORS for change in cases(family)]
    random.Random(0).shuffle(drawn)
    left = sweep.size(20, len(drawn))
    for n, (family, change) in enumerate(drawn):
        if not left:
            break
        folder = changed(folders[family], tmp_path / str(n), change)
        if folder is not None:
            left -= 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = wrong(family, folder)
            sweep.check(not found, f"{family} {change}: {found}")
            print(family, str(change)[:400], found or "ok", flush=True)
        shutil.rmtree(tmp_path / str(n))
    sweep.done()


@pytest.mark.slow
@pytest.mark.parametrize("family", SOLVED)
def test_a_solver_that_knows_no_flow_is_refused_for_one(folders, tmp_path, family):
    import diffusers

    said = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    for kind in SOLVERS:
        folder = changed(folders[family], tmp_path / kind, {"scheduler": said | {"_class_name": kind}})
        knows = "use_flow_sigmas" in inspect.signature(getattr(diffusers, kind)).parameters
        asked = recipe(family, {family: folder}, lora=False)
        describe = mmrl.load("pipelines", f"diffusion/{family}").describe
        if knows or kind == "FlowMatchEulerDiscreteScheduler":
            describe(asked, str(folder), None)
            continue
        with pytest.raises(UserError, match=f"a {kind}, is of no flow.*give it a FlowMatchEulerDiscreteScheduler"):
            describe(asked, str(folder), None)


@pytest.mark.slow
@pytest.mark.sweep("fields of schedulers together, for models that predict noise")
def test_schedulers_of_noise_draw_diffusers_picture(folders, tmp_path, sweep):
    written = [
        {k: v for k, v in zip(BETWEEN, of, strict=True) if v is not None} for of in itertools.product(*BETWEEN.values())
    ]
    draw = random.Random(0)
    common = [of for of in written if of["_class_name"] == "DDIMScheduler"]  # the class whose fields all have an effect
    for n in range(sweep.size(16, 800)):
        family, steps = draw.choice(UNETS), draw.choice((2, 4, 3))
        fields = draw.choice(written if n % 2 else common)
        folder = changed(folders[family], tmp_path / str(n), {"scheduler": TIMES | fields})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = wrong(family, folder, steps)
        sweep.check(not found, f"{family} {fields}, {steps} steps: {found}")
        shutil.rmtree(folder)
    sweep.done()
