"""Names of settings in TRL, verl, diffusers' training scripts and kohya's sd-scripts, and their equivalents here.

An error about an unknown key uses the tables, and ``tools/from_others_page.py`` makes docs/from_others.md from them. A
name that recipes have too, such as ``temperature``, needs no line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Here(NamedTuple):
    """The equivalent of a setting: keys of a recipe, or an option of ``mmrl train``; empty if mmrl has none."""

    keys: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        return " and ".join(self.keys) + (f" ({self.note})" if self.keys and self.note else self.note)


def _here(*keys: str, note: str = "") -> Here:
    return Here(keys, note)


TRL: Mapping[str, Here] = {
    "model_name_or_path": _here("model.path"),
    "torch_dtype": _here("model.dtype"),
    "bf16": _here("model.dtype", note="bfloat16"),
    "fp16": _here("model.dtype", note="float16 is not supported; use bfloat16"),
    "attn_implementation": _here("performance.attention"),
    "model_init_kwargs": _here("model", note="each supported argument is a key of this section"),
    "min_pixels": _here("model.min_pixels"),
    "max_pixels": _here("model.max_pixels"),
    "use_peft": _here("model.lora"),
    "lora_r": _here("model.lora.rank"),
    "lora_alpha": _here("model.lora.alpha"),
    "lora_target_modules": _here("model.lora.targets"),
    "dataset_name": _here("data.name", note="org/name of the hub, or a data set of mmrl; data.train has its options"),
    "datasets": _here("data.mixture"),
    "dataset_config": _here("data.train", note="{subset: ...}"),
    "dataset_train_split": _here("data.train", note="{split: ...}"),
    "dataset_test_split": _here("data.heldout", note="{split: ...}"),
    "chat_template_kwargs": _here("sampling.chat_template_kwargs"),
    "chat_template_path": _here("model.chat_template", note="a file, or the template's text"),
    "max_prompt_length": _here("sampling.max_prompt_tokens"),
    "max_completion_length": _here("sampling.max_new_tokens"),
    "num_generations": _here("train.group_size"),
    "num_generations_eval": _here("eval.samples_per_prompt"),
    "generation_batch_size": _here("sampling.batch_size"),
    "per_device_train_batch_size": _here("train.micro_batch_size", note="samples of one forward and backward pass"),
    "per_device_eval_batch_size": _here("sampling.batch_size"),
    "gradient_accumulation_steps": _here(
        "train.prompts_per_step",
        "train.micro_batch_size",
        note="a step accumulates over as many micro-batches as its prompts times train.group_size need",
    ),
    "steps_per_generation": _here("train.updates_per_step"),
    "num_iterations": _here(
        "train.updates_per_step", note="a step's samples are divided among its updates; each sample trains once"
    ),
    "learning_rate": _here("optim.lr"),
    "adam_beta1": _here("optim.betas"),
    "adam_beta2": _here("optim.betas"),
    "adam_epsilon": _here("optim.eps"),
    "lr_scheduler_type": _here("optim.schedule", note="constant, linear or cosine"),
    "lr_scheduler_kwargs": _here("optim.min_lr_ratio", note="min_lr_rate of cosine_with_min_lr"),
    "warmup_ratio": _here("optim.warmup_steps"),
    "max_steps": _here("train.steps"),
    "num_train_epochs": _here("train.steps", note="the number of steps, not of epochs"),
    "beta": _here("algorithm.kl_coef"),
    "epsilon": _here("algorithm.clip_low"),
    "epsilon_high": _here("algorithm.clip_high"),
    "delta": _here("algorithm.dual_clip"),
    "scale_rewards": _here("algorithm.advantage_std", note="group, batch or none"),
    "loss_type": _here("algorithm.type", "algorithm.aggregation"),
    "importance_sampling_level": _here("algorithm.type", note="gspo and gmpo have one ratio for a response"),
    "multi_objective_aggregation": _here("algorithm.advantage_aggregation"),
    "mask_truncated_completions": _here("algorithm.mask_truncated"),
    "sapo_temperature_pos": _here("algorithm.tau_pos"),
    "sapo_temperature_neg": _here("algorithm.tau_neg"),
    "completion_only_loss": _here(note="sft trains on the response's tokens alone; remove it"),
    "assistant_only_loss": _here(note="sft trains on the response's tokens alone; remove it"),
    "packing": _here("train.packing", note="whole records behind one another; none is cut"),
    "padding_free": _here("train.packing"),
    "reward_funcs": _here("rewards[0].name", note="a list of rewards; a function of TRL's gets one more line"),
    "reward_weights": _here("rewards[0].weight"),
    "use_vllm": _here("rollout.engine", note="vllm, or vllm_server for a separate server"),
    "vllm_mode": _here("rollout.engine", note="vllm for colocate, vllm_server for server"),
    "vllm_gpu_memory_utilization": _here("rollout.options", note="{gpu_memory_utilization: ...}"),
    "vllm_tensor_parallel_size": _here("rollout.options", note="{tensor_parallel_size: ...} of vllm_server"),
    "vllm_max_model_length": _here("rollout.options", note="{max_model_len: ...}"),
    "vllm_importance_sampling_correction": _here("rollout.importance"),
    "vllm_importance_sampling_mode": _here("rollout.importance", "rollout.importance_mode"),
    "vllm_importance_sampling_cap": _here("rollout.importance_cap"),
    "vllm_importance_sampling_clip_max": _here("rollout.importance_cap"),
    "vllm_importance_sampling_clip_min": _here("rollout.importance_floor"),
    "report_to": _here("log"),
    "run_name": _here("name"),
    "output_dir": _here("--out", note="an option of mmrl train"),
    "resume_from_checkpoint": _here("--resume", note="an option of mmrl train"),
    "logging_steps": _here(note="every step is logged; remove it"),
    "save_steps": _here("checkpoint.every"),
    "save_total_limit": _here("checkpoint.keep"),
    "push_to_hub": _here("--push-to-hub", note="an option of mmrl export, after the run"),
    "hub_model_id": _here("--push-to-hub", note="an option of mmrl export: ORG/NAME"),
    "hub_private_repo": _here("--push-to-hub", note="an option of mmrl export; private unless --public"),
    "hub_token": _here(note="set HF_TOKEN, or run hf auth login; remove it"),
    "shuffle_order": _here("rewards[0].options", note="{order: random} of a judge; average asks both orders"),
    "eval_steps": _here("eval.every"),
    "sync_ref_model": _here(note="the reference stays as the run began; remove it"),
    "generation_kwargs": _here("sampling", note="stop, min_new_tokens, repetition_penalty, min_p, top_p, top_k"),
    "stop_strings": _here("sampling.stop"),
    "vllm_sampling_params": _here("rollout.sampling", note="fields of vLLM's SamplingParams"),
}
"""Of TRL's GRPOConfig, DPOConfig, SFTConfig and ModelConfig, and of the transformers arguments below them."""

DIFFUSERS: Mapping[str, Here] = {
    "pretrained_model_name_or_path": _here("model.path"),
    "mixed_precision": _here("model.dtype"),
    "dataset_config_name": _here("data.train", note="{subset: ...}"),
    "train_data_dir": _here("data.name", note="folder; data.train has its path"),
    "caption_column": _here("data.train", note="{columns: {prompt: ...}}"),
    "image_column": _here("data.train", note="{columns: {image: ...}}"),
    "rank": _here("model.lora.rank"),
    "resolution": _here("sampling.height", "sampling.width"),
    "aspect_ratio_buckets": _here("sampling.buckets", note="[[height, width], ...] in place of 'h,w;h,w'"),
    "num_inference_steps": _here("sampling.steps"),
    "num_frames": _here("sampling.frames"),
    "sample_num_steps": _here("sampling.steps"),
    "sample_guidance_scale": _here("sampling.guidance_scale"),
    "true_cfg_scale": _here("sampling.guidance_scale"),
    "negative_prompt": _here("sampling.negative_prompt", note="a column negative_prompt of the records wins"),
    "sample_batch_size": _here("sampling.batch_size"),
    "train_batch_size": _here("train.micro_batch_size"),
    "train_clip_range": _here("algorithm.clip_range"),
    "train_learning_rate": _here("optim.lr"),
    "train_adv_clip_max": _here("algorithm.advantage_clip"),
    "train_timestep_fraction": _here("algorithm.trained_steps", note="a number of steps"),
    "max_train_steps": _here("train.steps"),
    "lr_scheduler": _here("optim.schedule"),
    "lr_warmup_steps": _here("optim.warmup_steps"),
    "checkpointing_steps": _here("checkpoint.every"),
    "checkpoints_total_limit": _here("checkpoint.keep"),
    "validation_prompt": _here("--prompt", note="an option of mmrl sample"),
    "num_validation_images": _here("--n", note="an option of mmrl sample"),
    "push_to_hub": _here("--push-to-hub", note="an option of mmrl export, after the run"),
    "hub_model_id": _here("--push-to-hub", note="an option of mmrl export: ORG/NAME"),
    "hub_token": _here(note="set HF_TOKEN, or run hf auth login; remove it"),
    "use_ema": _here("optim.ema_decay"),
}
"""Of diffusers' training scripts and of DDPO's and Flow-GRPO's configurations."""

KOHYA: Mapping[str, Here] = {
    "enable_bucket": _here("sampling.buckets", note="the list of sizes, [[height, width], ...]"),
    "min_bucket_reso": _here("sampling.buckets", note="lists the sizes themselves"),
    "max_bucket_reso": _here("sampling.buckets", note="lists the sizes themselves"),
    "bucket_reso_steps": _here("sampling.buckets", note="lists the sizes themselves"),
    "bucket_no_upscale": _here(note="a picture is scaled until it fills its bucket, also up; remove it"),
}
"""Of the data set configurations of kohya's sd-scripts."""

VERL: Mapping[str, Here] = {
    "algorithm.filter_groups.enable": _here("algorithm.dynamic_sampling"),
    "algorithm.filter_groups.max_num_gen_batches": _here("algorithm.max_attempts", note="of each slot"),
    "actor_rollout_ref.model.path": _here("model.path"),
    "actor_rollout_ref.model.custom_chat_template": _here("model.chat_template"),
    "actor_rollout_ref.model.lora_rank": _here("model.lora.rank"),
    "actor_rollout_ref.model.lora_alpha": _here("model.lora.alpha"),
    "actor_rollout_ref.model.lora_adapter_path": _here("model.lora.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _here("model.gradient_checkpointing"),
    "actor_rollout_ref.actor.strategy": _here("train.backend"),
    "actor_rollout_ref.actor.optim.lr": _here("optim.lr"),
    "actor_rollout_ref.actor.optim.weight_decay": _here("optim.weight_decay"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": _here("optim.schedule"),
    "actor_rollout_ref.actor.optim.warmup_style": _here("optim.schedule"),
    "actor_rollout_ref.actor.optim.min_lr_ratio": _here("optim.min_lr_ratio"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _here("optim.warmup_steps"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": _here(
        "train.updates_per_step", note="how many updates a step's samples are divided among"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _here("train.micro_batch_size"),
    "actor_rollout_ref.model.use_remove_padding": _here("train.packing"),
    "actor_rollout_ref.actor.use_dynamic_bsz": _here("train.micro_batch_tokens"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _here("train.micro_batch_tokens"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _here("train.context_parallel"),
    "actor_rollout_ref.actor.clip_ratio": _here("algorithm.clip_low", "algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_low": _here("algorithm.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": _here("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": _here("algorithm.dual_clip"),
    "actor_rollout_ref.actor.tau_pos": _here("algorithm.tau_pos"),
    "actor_rollout_ref.actor.tau_neg": _here("algorithm.tau_neg"),
    "actor_rollout_ref.actor.freeze_vision_tower": _here("model.freeze"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": _here("algorithm.type", note="gmpo for geo_mean"),
    "actor_rollout_ref.actor.loss_agg_mode": _here(
        "algorithm.aggregation", note="token_mean, seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm"
    ),
    "actor_rollout_ref.actor.entropy_coeff": _here("algorithm.entropy_coef"),
    "actor_rollout_ref.actor.use_kl_loss": _here("algorithm.kl_coef", note="above 0"),
    "actor_rollout_ref.actor.kl_loss_coef": _here("algorithm.kl_coef"),
    "actor_rollout_ref.actor.kl_loss_type": _here(
        "algorithm.kl_estimator", note="k1 for kl, k2 for mse, k3 for low_var_kl, and + for straight-through"
    ),
    "actor_rollout_ref.actor.ppo_epochs": _here(note="each sample trains once in a step; remove it"),
    "actor_rollout_ref.rollout.name": _here("rollout.engine"),
    "actor_rollout_ref.rollout.n": _here("train.group_size"),
    "actor_rollout_ref.rollout.temperature": _here("sampling.temperature"),
    "actor_rollout_ref.rollout.top_p": _here("sampling.top_p"),
    "actor_rollout_ref.rollout.top_k": _here("sampling.top_k"),
    "actor_rollout_ref.rollout.prompt_length": _here("sampling.max_prompt_tokens"),
    "actor_rollout_ref.rollout.response_length": _here("sampling.max_new_tokens"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": _here("rollout.options", note="{gpu_memory_utilization: ...}"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _here(
        "rollout.options", note="{tensor_parallel_size: ...} of vllm_server"
    ),
    "actor_rollout_ref.rollout.val_kwargs.n": _here("eval.samples_per_prompt"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": _here("eval.temperature"),
    "algorithm.adv_estimator": _here("algorithm.type"),
    "algorithm.lam": _here("algorithm.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": _here("algorithm.advantage_std", note="group or none"),
    "algorithm.gigpo.step_advantage_w": _here("algorithm.turn_weight", note="verl-agent; with algorithm.credit: turn"),
    "algorithm.gigpo.mode": _here("algorithm.advantage_std", note="group for mean_std_norm, none for mean_norm"),
    "algorithm.use_kl_in_reward": _here("algorithm.type", note="ppo, rloo and reinforce_pp do, by kl_coef"),
    "algorithm.kl_ctrl.kl_coef": _here("algorithm.kl_coef"),
    "algorithm.rollout_correction.rollout_is": _here("rollout.importance"),
    "algorithm.rollout_correction.rollout_is_threshold": _here("rollout.importance_cap"),
    "algorithm.rollout_correction.rollout_rs": _here("rollout.rejection[0].statistic"),
    "algorithm.rollout_correction.rollout_rs_threshold": _here("rollout.rejection[0].high", "rollout.rejection[0].low"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": _here("rollout.importance_normalize", note="batch"),
    "critic.optim.lr": _here("algorithm.critic_lr"),
    "data.train_files": _here("data.train", "data.mixture", note="a list of files is a mixture, or a folder"),
    "data.val_files": _here("data.heldout"),
    "data.prompt_key": _here("data.train", note="{columns: {prompt: ...}}"),
    "data.image_key": _here("data.train", note="{columns: {image: ...}}"),
    "data.messages_key": _here("data.train", note="{prompt: ...}; of messages the last one is the response"),
    "data.train_batch_size": _here("train.prompts_per_step"),
    "data.max_prompt_length": _here("sampling.max_prompt_tokens"),
    "data.max_response_length": _here("sampling.max_new_tokens"),
    "data.sampler.class_path": _here("data.sampler", note="path/to/file.py:Class"),
    "data.sampler.class_name": _here("data.sampler", note="path/to/file.py:Class"),
    "data.filter_overlong_prompts": _here("data.overlong"),
    "data.truncation": _here("data.overlong"),
    "data.apply_chat_template_kwargs": _here("sampling.chat_template_kwargs"),
    "custom_reward_function.path": _here("rewards[0].name", note="path/to/file.py:function, with one more line"),
    "custom_reward_function.name": _here("rewards[0].name", note="path/to/file.py:function"),
    "trainer.total_training_steps": _here("train.steps"),
    "trainer.total_epochs": _here("train.steps", note="the number of steps, not of epochs"),
    "trainer.save_freq": _here("checkpoint.every"),
    "trainer.test_freq": _here("eval.every"),
    "trainer.max_actor_ckpt_to_keep": _here("checkpoint.keep"),
    "trainer.balance_batch": _here("train.balance"),
    "trainer.logger": _here("log"),
    "trainer.experiment_name": _here("name"),
    "trainer.default_local_dir": _here("--out", note="an option of mmrl train"),
    "trainer.resume_mode": _here("--resume", note="an option of mmrl train"),
    "trainer.n_gpus_per_node": _here("controllers", "devices_per_controller"),
    "trainer.nnodes": _here("ray", note="with Ray; torchrun and Slurm are given it: mmrl launch prints their files"),
}
"""By the whole path in verl's configuration; ``..._per_gpu`` and other variants of a name are listed once."""

TOOLS = {"TRL": TRL, "diffusers": DIFFUSERS, "kohya": KOHYA, "verl": VERL}


def peer_message(key: str, written: object = None) -> str:
    """``; verl's rollout.n is train.group_size here`` for a key of these tools, else an empty text.

    ``key``: a dotted path, or the last part of one. ``written``: the section under it; up to three of its settings are
    named.
    """
    if isinstance(written, Mapping) and written:
        said = [peer_message(f"{key}.{inner}", value) for inner, value in written.items()]
        return "".join([text for text in said if text][:3])
    for name in (key, key.rpartition(".")[2]):
        for tool, names in TOOLS.items():
            if name in names:
                return _said(tool, name, names[name])
    ends = [name for name in VERL if name.endswith(f".{key}")]
    return _said("verl", ends[0], VERL[ends[0]]) if ends else ""


def _said(tool: str, name: str, here: Here) -> str:
    return f"; {tool}'s {name} is {here} here" if here.keys else f"; {tool}'s {name}: {here}"
