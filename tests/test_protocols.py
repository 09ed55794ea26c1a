"""Every algorithm satisfies the protocol of its kind: pyright reads the lists, and the test that none is missing."""

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


def test_every_algorithm_is_of_one_kind():
    kinds = [POLICY_GRADIENT, FORWARD_PROCESS, PATHWISE, OFFLINE]
    assert sorted(cls.__module__.rpartition(".")[2] for kind in kinds for cls in kind) == list(algorithm_names())
    assert [{cls.kind for cls in kind} for kind in kinds] == [
        {"policy_gradient"},
        {"forward_process"},
        {"pathwise"},
        {"offline"},
    ]
