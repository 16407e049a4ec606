"""A Llama with random weights, split over the ranks by its tensor-parallel plan, generates tokens:
transformers_tensor_parallel.py BACKEND FOLDER. Rank 0 prints the tokens."""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

backend, folder = sys.argv[1:]
# transformers uses the group that exists; by itself it chooses gloo
torch.distributed.init_process_group(backend)
rank = torch.distributed.get_rank()
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=128,
    eos_token_id=None,
)
torch.manual_seed(0)
whole = LlamaForCausalLM(config)
if rank == 0:
    whole.save_pretrained(folder)
torch.distributed.barrier()
model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
local = model.model.layers[0].mlp.up_proj.weight
local = local.to_local() if hasattr(local, "to_local") else local
assert local.shape[0] == 128 // torch.distributed.get_world_size(), "the model is not split"

prompt = torch.arange(8).unsqueeze(0)
with torch.inference_mode():
    error = (model(prompt).logits - whole(prompt).logits).abs().max().item()
    tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)
assert error < 1e-4, error
if rank == 0:
    print(json.dumps({"tokens": tokens[0].tolist()}))
torch.distributed.destroy_process_group()
