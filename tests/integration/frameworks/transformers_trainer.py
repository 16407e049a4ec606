"""Hugging Face's Trainer trains and evaluates a small GPT-2: transformers_trainer.py BACKEND FOLDER."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

backend, folder = sys.argv[1:]
# Trainer uses the group that exists; by itself it chooses gloo
torch.distributed.init_process_group(backend)
options = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "logging_steps": 3,
    "save_steps": 6,
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 0,
}
arguments = TrainingArguments(output_dir=folder, use_cpu=True, **options)
assert arguments.world_size == torch.distributed.get_world_size()
assert torch.distributed.get_backend() == backend

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False)
tokens = torch.randint(0, 64, (50, 16))
items = [{"input_ids": each, "labels": each} for each in tokens]
trainer = Trainer(
    GPT2LMHeadModel(config),
    arguments,
    train_dataset=items,
    eval_dataset=items[:11],
    compute_metrics=lambda found: {"items": len(found.predictions), "tokens": int(found.label_ids.sum())},
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    results = {name: value for name, value in metrics.items() if "second" not in name and "runtime" not in name}
    results["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps(results))
torch.distributed.destroy_process_group()
