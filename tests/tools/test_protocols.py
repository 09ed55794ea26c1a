"""What ships satisfies its protocol: pyright, which checks this file, reads the lists, and the tests that none is
missing."""

import ast
import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mmrl
from mmrl.algorithms import (
    alignprop,
    awm,
    capo,
    cispo,
    crd,
    dapo,
    dgpo,
    diffusion_dpo,
    diffusion_nft,
    dpo,
    dr_grpo,
    draft,
    drpo,
    flow_dppo,
    flow_grpo,
    gmpo,
    grpo,
    grpo_guard,
    gspo,
    kto,
    orpo,
    picture_dpo,
    picture_sft,
    ppo,
    raft,
    refl,
    reinforce_pp,
    reward_model,
    rloo,
    rwr,
    sapo,
    sdpo,
    sft,
    srpo,
    stepwise_flow_grpo,
    v_grpo,
)
from mmrl.algorithms.objective import ForwardProcess, Offline, Pathwise, PolicyGradient
from mmrl.config.algorithms import algorithm_names
from mmrl.core.plugins.loading import names
from mmrl.core.reward_contract import RewardClass, RewardFunction, Sleeper
from mmrl.core.rollout_engine import RolloutEngine
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.inference.lazy_engine import LazyEngine, NoEngine
from mmrl.inference.sglang import SglangServer
from mmrl.inference.vllm import VllmEngine
from mmrl.inference.vllm_server import VllmServer
from mmrl.models.context_parallel import InContext
from mmrl.models.protocol import DenoisingPipeline, TextPipeline
from mmrl.models.sequence_parallel import InSequence
from mmrl.models.sharded import Sharded
from mmrl.models.weights import Replicated, Weights
from mmrl.rewards.judging.local import LocalModel
from mmrl.rewards.judging.protocol import LocalJudge, RemoteJudge
from mmrl.rewards.judging.remote import Endpoint
from mmrl.rewards.judging.server import ServedJudge

if TYPE_CHECKING:  # the drop-in folders join the package at run time
    from mmrl.models.megatron.weights import ModelParallel
    from pipelines.diffusion.flow import FlowPipeline
    from rewards import (
        aesthetic,
        answer,
        clap,
        clip,
        colour,
        constraints,
        distilled,
        environment,
        frames,
        geneval,
        hpsv2,
        http,
        imagereward,
        jpeg,
        judge,
        knowledge,
        labels,
        likeness,
        motion,
        ocr,
        pickscore,
        relevance,
        shapes,
        teacher,
        vbench,
        verifiers,
        votes,
    )
    from rewards import reward_model as model_reward
else:
    from mmrl.rewards import (
        aesthetic,
        answer,
        clap,
        clip,
        colour,
        constraints,
        distilled,
        environment,
        frames,
        geneval,
        hpsv2,
        http,
        imagereward,
        jpeg,
        judge,
        knowledge,
        labels,
        likeness,
        motion,
        ocr,
        pickscore,
        relevance,
        shapes,
        teacher,
        vbench,
        verifiers,
        votes,
    )
    from mmrl.rewards import reward_model as model_reward

    FlowPipeline = mmrl.load("pipelines", "diffusion/flow").FlowPipeline

ROOT = Path(__file__).resolve().parents[2]
POLICY_GRADIENT: list[type[PolicyGradient]] = [
    capo.CAPO,
    cispo.CISPO,
    dapo.DAPO,
    dr_grpo.DrGRPO,
    drpo.DRPO,
    flow_dppo.FlowDPPO,
    flow_grpo.FlowGRPO,
    gmpo.GMPO,
    grpo.GRPO,
    grpo_guard.GRPOGuard,
    gspo.GSPO,
    ppo.PPO,
    raft.RAFT,
    reinforce_pp.ReinforcePP,
    rloo.RLOO,
    sapo.SAPO,
    sdpo.SDPO,
    stepwise_flow_grpo.StepwiseFlowGRPO,
]
FORWARD_PROCESS: list[type[ForwardProcess]] = [
    awm.AWM,
    crd.CRD,
    dgpo.DGPO,
    diffusion_dpo.DiffusionDPO,
    diffusion_nft.DiffusionNFT,
    rwr.RWR,
    v_grpo.VGRPO,
]
PATHWISE: list[type[Pathwise]] = [
    alignprop.AlignProp,
    draft.DRaFT,
    refl.ReFL,
    srpo.SRPO,
]
OFFLINE: list[type[Offline]] = [
    dpo.DPO,
    kto.KTO,
    orpo.ORPO,
    picture_dpo.PictureDPO,
    picture_sft.PictureSFT,
    reward_model.RewardModel,
    sft.SFT,
]
TEXT: list[type[TextPipeline]] = [LanguagePipeline]
DENOISING: list[type[DenoisingPipeline]] = [FlowPipeline]
ENGINES: list[type[RolloutEngine]] = [LazyEngine, NoEngine, SglangServer, VllmEngine, VllmServer]
WEIGHTS: list[type[Weights]] = [InContext, InSequence, Replicated, Sharded]
if TYPE_CHECKING:  # needs Megatron-Core
    WEIGHTS.append(ModelParallel)
FUNCTIONS: list[RewardFunction] = [
    colour.brightness,
    colour.saturation,
    partial(colour.share, rgb=(255, 0, 0)),
    partial(colour.target, rgb=(255, 0, 0)),
    constraints.score,
    environment.score,
    verifiers.score,
    jpeg.compressibility,
    jpeg.incompressibility,
    motion.looks,
    motion.score,
    motion.steady,
    shapes.kept,
    shapes.score,
    vbench.flicker,
]
SLEEPERS: list[type[Sleeper]] = [
    aesthetic.Aesthetic,
    aesthetic.PathwiseAesthetic,
    clap.Clap,
    clip.ClipScore,
    clip.PathwiseClip,
    distilled.Distilled,
    frames.Frames,
    geneval.GenEval,
    hpsv2.HPSv2,
    hpsv2.PathwiseHPSv2,
    imagereward.ImageReward,
    imagereward.PathwiseImageReward,
    judge.Judge,
    likeness.Likeness,
    ocr.OCR,
    pickscore.PathwisePickScore,
    pickscore.PickScore,
    relevance.Relevance,
    model_reward.RewardModel,
    teacher.Teacher,
    vbench.Background,
    vbench.Subject,
]
CLASSES: list[type[RewardClass]] = [
    aesthetic.Aesthetic,
    aesthetic.PathwiseAesthetic,
    answer.Boxed,
    answer.Exact,
    answer.Math,
    answer.Number,
    clap.Clap,
    clip.ClipScore,
    clip.PathwiseClip,
    distilled.Distilled,
    frames.Frames,
    geneval.GenEval,
    hpsv2.HPSv2,
    hpsv2.PathwiseHPSv2,
    http.Http,
    imagereward.ImageReward,
    imagereward.PathwiseImageReward,
    judge.Judge,
    knowledge.Knowledge,
    labels.Labels,
    likeness.Likeness,
    ocr.OCR,
    pickscore.PathwisePickScore,
    pickscore.PickScore,
    relevance.Relevance,
    model_reward.RewardModel,
    teacher.Teacher,
    vbench.Background,
    vbench.Subject,
    votes.Voted,
]
LOCAL_JUDGES: list[type[LocalJudge]] = [LocalModel]
REMOTE_JUDGES: list[type[RemoteJudge]] = [Endpoint, ServedJudge]
LAYOUTS = ["ModelParallel", *(cls.__name__ for cls in WEIGHTS)]


def test_every_algorithm_is_of_one_kind():
    kinds = [POLICY_GRADIENT, FORWARD_PROCESS, PATHWISE, OFFLINE]
    assert sorted(cls.__module__.rpartition(".")[2] for kind in kinds for cls in kind) == list(algorithm_names())
    assert [{cls.kind for cls in kind} for kind in kinds] == [
        {"policy_gradient"},
        {"forward_process"},
        {"pathwise"},
        {"offline"},
    ]


def test_every_pipeline_is_of_one_kind():
    modules = [mmrl.load("pipelines", name) for name in names("pipelines")]
    built = {inspect.signature(module.build).return_annotation for module in modules if hasattr(module, "build")}
    assert built == {cls.__name__ for cls in (*TEXT, *DENOISING)}


@pytest.mark.parametrize(("ours", "other"), [(TEXT, DenoisingPipeline), (DENOISING, TextPipeline)])
def test_no_pipeline_has_methods_of_the_other_kind(ours: list[type], other: type):
    methods = {name for name in vars(other) if not name.startswith("_")} - {"makes"}
    assert methods
    assert [(cls.__name__, name) for cls in ours for name in methods if hasattr(cls, name)] == []


@pytest.mark.parametrize(
    ("method", "others", "listed"),
    [
        ("update_lora", {"RolloutEngine"}, [cls.__name__ for cls in ENGINES]),
        ("unsharded", {"Weights", "Policy"}, LAYOUTS),
    ],
)
def test_no_engine_and_no_layout_of_weights_is_missing(method: str, others: set[str], listed: list[str]):
    files = (path for folder in ("core", "models", "inference") for path in (ROOT / "mmrl" / folder).rglob("*.py"))
    trees = [ast.parse(path.read_bytes()) for path in files]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    having = {c.name for c in classes if any(isinstance(f, ast.FunctionDef) and f.name == method for f in c.body)}
    assert having == {*others, *listed}


def _names(listed: list[RewardFunction]) -> set[str]:
    plain = [one.func if isinstance(one, partial) else one for one in listed]
    return {f"{inspect.getmodule(one).__name__}.{one.__name__}" for one in plain}  # type: ignore[union-attr]


def test_every_reward_is_a_function_or_a_class_and_none_is_missing():
    functions, classes, sleepers = set(), set(), set()
    for file in (ROOT / "rewards").glob("*.py"):
        module = mmrl.load("rewards", file.stem)
        public = [v for k, v in vars(module).items() if not k.startswith("_") and inspect.getmodule(v) is module]
        for made in public:
            title = f"{module.__name__}.{getattr(made, '__name__', '')}"
            if inspect.isclass(made):
                classes |= {title} if hasattr(made, "score") else set()
                sleepers |= {title} if hasattr(made, "score") and hasattr(made, "sleep") else set()
            elif inspect.isfunction(made):
                parameters = inspect.signature(made).parameters.values()
                functions |= {title for p in parameters if p.name == "context" and p.kind is p.KEYWORD_ONLY}
    assert functions == _names(FUNCTIONS)
    assert classes == {f"{cls.__module__}.{cls.__name__}" for cls in CLASSES}
    assert sleepers == {f"{cls.__module__}.{cls.__name__}" for cls in SLEEPERS}


def test_no_judge_is_missing():
    trees = [ast.parse(path.read_bytes()) for path in (ROOT / "mmrl" / "rewards" / "judging").rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    asked = {c.name: [f for f in c.body if getattr(f, "name", "") == "ask"] for c in classes}
    there = {name for name, found in asked.items() if found}
    local = {name for name, found in asked.items() if found and isinstance(found[0], ast.FunctionDef)}
    assert local == {"LocalJudge", *(cls.__name__ for cls in LOCAL_JUDGES)}
    assert there - local == {"RemoteJudge", *(cls.__name__ for cls in REMOTE_JUDGES)}
