"""Tokens per second of vLLM on 2 CPU workers, by the communicator of its tensor-parallel group.

The model is a Llama with random weights. The engines generate in rotation, and all must generate the same tokens.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

from transformers import LlamaConfig

WORKERS = {"gloo": "vllm_worker.GlooWorker", "dist_prims": "vllm_worker.PrimsWorker", "vllm": "auto"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--communicators", default=",".join(WORKERS), type=lambda text: text.split(","))
    given = parser.parse_args()
    from vllm import LLM, SamplingParams, __version__

    config = LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=2 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=given.hidden // 64,
        vocab_size=512,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engines = {
            name: LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                tensor_parallel_size=2,
                distributed_executor_backend="mp",
                worker_cls=WORKERS[name],
                dtype="float32",
                max_model_len=256,
                enforce_eager=True,
                enable_prefix_caching=False,
                seed=0,
            )
            for name in given.communicators
        }
    sampling = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True, detokenize=False)
    names, seconds = [*engines], {name: [] for name in engines}
    for round in range(-2, given.rounds):
        prompts = [{"prompt_token_ids": [round + 3 + each, 1, 2, 3]} for each in range(given.batch)]
        tokens = {}
        for name in names[round % len(names) :] + names[: round % len(names)]:
            began = time.perf_counter()
            found = engines[name].generate(prompts, sampling, use_tqdm=False)
            if round >= 0:
                seconds[name].append(time.perf_counter() - began)
            tokens[name] = [each.outputs[0].token_ids for each in found]
        assert all(each == tokens[names[0]] for each in tokens.values()), "the engines differ"
    count = given.tokens * given.batch
    results = {name: {"tokens per second": count / statistics.median(each)} for name, each in seconds.items()}
    for name, each in seconds.items():
        ratios = [first / own for first, own in zip(seconds[names[0]], each, strict=True)]
        results[name][f"speedup over {names[0]}"] = statistics.median(ratios)
    print(json.dumps({"version": __version__, **vars(given), **results}))


if __name__ == "__main__":
    main()
