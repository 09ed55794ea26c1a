"""Names of settings in other tools: the keys they lead to exist, the messages name them, the page is up to date."""

import runpy
from pathlib import Path

import pytest

from mmrl.config import peer_names
from mmrl.config.error_messages import _all_keys
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe

OPTIONS = ("--out", "--resume", "--push-to-hub", "--prompt", "--n")
"""Of commands."""


@pytest.mark.parametrize("tool", peer_names.tools())
def test_every_name_leads_to_a_key_that_exists(tool):
    keys = {*_all_keys(), "rewards[0].name"}
    for name, here in peer_names.tools()[tool].items():
        assert here.keys or here.note, name
        assert all(key in keys or key in OPTIONS for key in here.keys), name


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learning_rate=1e-4", "TRL's learning_rate is optim.lr here"),
        ("train.gradient_accumulation_steps=4", "is train.prompts_per_step and train.micro_batch_size (a step accumul"),
        ("report_to=wandb", "TRL's report_to is log here"),
        ("network_dim=16", "kohya's network_dim is model.lora.rank here"),
        ("train.min_snr_gamma=5", "kohya's min_snr_gamma: Min-SNR weights are not offered; remove it"),
        ("network.linear=16", "ai-toolkit's network.linear is model.lora.rank here"),
        ("model.name_or_path=x/y", "ai-toolkit's model.name_or_path is model.path here"),
        ("num_generations=8", "TRL's num_generations is train.group_size here"),
        ("algorithm.beta=100", "TRL's beta is algorithm.kl_coef here; type crd, dgpo, "),
        ("algorithm.epsilon=0.2", "TRL's epsilon is algorithm.clip_low here"),
        ("max_completion_length=64", "is sampling.max_new_tokens here"),
        ("sampling.num_inference_steps=8", "diffusers's num_inference_steps is sampling.steps here"),
        ("actor_rollout_ref.rollout.n=8", "verl's actor_rollout_ref.rollout.n is train.group_size here"),
        ("data.train_batch_size=8", "verl's data.train_batch_size is train.prompts_per_step here"),
        ("trainer.save_freq=8", "verl's trainer.save_freq is checkpoint.every here"),
        ("clip_ratio_c=3", "verl's actor_rollout_ref.actor.clip_ratio_c is algorithm.dual_clip here"),
        ("logging_steps=1", "every step is logged; remove it"),
        ("push_to_hub=true", "TRL's push_to_hub is --push-to-hub (an option of mmrl export"),
        ("train.num_validation_images=4", "diffusers's num_validation_images is --n (an option of mmrl sample)"),
    ],
)
def test_a_key_of_another_tool_gets_ours(setting, said):
    with pytest.raises(RecipeError) as error:
        load_recipe(["sums"], [setting])
    assert said in str(error.value)


def test_the_page_is_what_the_tables_say():
    root = Path(__file__).parents[2]
    tool = "tools/from_others_page.py"
    page = runpy.run_path(str(root / tool))["page"]()
    assert (root / "docs" / "reference" / "from_others.md").read_text() == page, (
        "python tools/from_others_page.py > docs/reference/from_others.md"
    )
