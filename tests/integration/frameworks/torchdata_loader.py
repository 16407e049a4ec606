"""StatefulDataLoader, interrupted and resumed, gives each item to one rank: torchdata_loader.py BACKEND."""

import json
import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import dist_prims
from dist_prims.training import ShardedSampler

ITEMS, SEEN_BEFORE = 101, 3


def make_loader():
    sampler = ShardedSampler(ITEMS, seed=0, uneven="keep")
    return StatefulDataLoader(range(ITEMS), batch_size=4, sampler=sampler, num_workers=2)


backend = sys.argv[1]
dist_prims.init(backend)
loader = make_loader()
batches = iter(loader)
seen = [next(batches) for _ in range(SEEN_BEFORE)]
states = [None] * torch.distributed.get_world_size()
torch.distributed.all_gather_object(states, loader.state_dict())  # as a checkpoint would

resumed = make_loader()
resumed.load_state_dict(states[torch.distributed.get_rank()])
seen += [*resumed]
everywhere = [None] * torch.distributed.get_world_size()
torch.distributed.all_gather_object(everywhere, torch.cat(seen).tolist())
items = sorted(item for each in everywhere for item in each)
assert items == [*range(ITEMS)], items
if torch.distributed.get_rank() == 0:
    print(json.dumps({"items": len(items)}))
torch.distributed.destroy_process_group()
