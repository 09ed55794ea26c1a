from datasets import load_dataset
from theirs import right
from trl import GRPOConfig, GRPOTrainer

data = load_dataset("csv", data_files="questions.csv", split="train").rename_column("question", "prompt")
settings = GRPOConfig(num_generations=8, per_device_train_batch_size=64, max_completion_length=512, max_steps=200)
GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[right], args=settings, train_dataset=data).train()
