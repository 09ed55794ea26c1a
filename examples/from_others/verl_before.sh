python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
  data.train_files=train.parquet data.val_files=test.parquet \
  data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  custom_reward_function.path=theirs.py custom_reward_function.name=compute_score \
  trainer.total_training_steps=200
