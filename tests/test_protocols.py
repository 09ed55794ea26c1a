"""What ships satisfies its protocol: pyright, which checks this file, reads the lists, and the tests that none is
missing."""

import inspect
from typing import TYPE_CHECKING

import pytest

import mmrl
from mmrl._load import names
from mmrl.algorithms import (
    alignprop,
    awm,
    capo,
    cispo,
    dapo,
    dgpo,
    diffusion_dpo,
    diffusion_nft,
    dpo,
    dr_grpo,
    draft,
    flow_dppo,
    flow_grpo,
    grpo,
    grpo_guard,
    gspo,
    picture_dpo,
    ppo,
    refl,
    reinforce_pp,
    reward_model,
    rloo,
    rwr,
    srpo,
)
from mmrl.algorithms.objective import ForwardProcess, Offline, Pathwise, PolicyGradient
from mmrl.config.algorithms import algorithm_names
from mmrl.pipelines.protocol import DenoisingPipeline, TextPipeline
from mmrl.text.pipeline import LanguagePipeline

if TYPE_CHECKING:  # the drop-in folders join the package at run time
    from pipelines.diffusion.flow import FlowPipeline
else:
    FlowPipeline = mmrl.load("pipelines", "diffusion/flow").FlowPipeline

POLICY_GRADIENT: list[type[PolicyGradient]] = [
    capo.CAPO,
    cispo.CISPO,
    dapo.DAPO,
    dr_grpo.DrGRPO,
    flow_dppo.FlowDPPO,
    flow_grpo.FlowGRPO,
    grpo.GRPO,
    grpo_guard.GRPOGuard,
    gspo.GSPO,
    ppo.PPO,
    reinforce_pp.ReinforcePP,
    rloo.RLOO,
]
FORWARD_PROCESS: list[type[ForwardProcess]] = [
    awm.AWM,
    dgpo.DGPO,
    diffusion_dpo.DiffusionDPO,
    diffusion_nft.DiffusionNFT,
    rwr.RWR,
]
PATHWISE: list[type[Pathwise]] = [
    alignprop.AlignProp,
    draft.DRaFT,
    refl.ReFL,
    srpo.SRPO,
]
OFFLINE: list[type[Offline]] = [
    dpo.DPO,
    picture_dpo.PictureDPO,
    reward_model.RewardModel,
]
TEXT: list[type[TextPipeline]] = [LanguagePipeline]
DENOISING: list[type[DenoisingPipeline]] = [FlowPipeline]


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
def test_no_pipeline_has_methods_of_the_other_kind(ours, other):
    methods = {name for name in vars(other) if not name.startswith("_")} - {"makes"}
    assert methods
    assert [(cls.__name__, name) for cls in ours for name in methods if hasattr(cls, name)] == []
