"""Every algorithm satisfies the protocol of its kind: pyright reads the lists, and the test that none is missing."""

from pathlib import Path

import mmrl.algorithms
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

POLICY_GRADIENT: list[type[PolicyGradient]] = [
    capo.Objective,
    cispo.Objective,
    dapo.Objective,
    dr_grpo.Objective,
    flow_dppo.Objective,
    flow_grpo.Objective,
    grpo.Objective,
    grpo_guard.Objective,
    gspo.Objective,
    ppo.Objective,
    reinforce_pp.Objective,
    rloo.Objective,
]
FORWARD_PROCESS: list[type[ForwardProcess]] = [
    awm.Objective,
    dgpo.Objective,
    diffusion_dpo.Objective,
    diffusion_nft.Objective,
    rwr.Objective,
]
PATHWISE: list[type[Pathwise]] = [
    alignprop.Objective,
    draft.Objective,
    refl.Objective,
    srpo.Objective,
]
OFFLINE: list[type[Offline]] = [
    dpo.Objective,
    picture_dpo.Objective,
    reward_model.Objective,
]


def test_every_algorithm_is_of_one_kind():
    folder = Path(mmrl.algorithms.__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py") if "\nclass Objective(" in path.read_text()}
    kinds = [POLICY_GRADIENT, FORWARD_PROCESS, PATHWISE, OFFLINE]
    assert sorted(cls.__module__.rpartition(".")[2] for kind in kinds for cls in kind) == sorted(files)
    assert [{cls.kind for cls in kind} for kind in kinds] == [
        {"policy_gradient"},
        {"forward_process"},
        {"pathwise"},
        {"offline"},
    ]
