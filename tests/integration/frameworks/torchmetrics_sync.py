"""Metrics of torchmetrics, synchronized by a backend and by gloo, are equal: torchmetrics_sync.py BACKEND."""

import json
import sys

import torch
import torchmetrics
import torchmetrics.classification
import torchmetrics.regression

backend = sys.argv[1]
torch.distributed.init_process_group(backend)
rank = torch.distributed.get_rank()
groups = {backend: torch.distributed.group.WORLD, "gloo": torch.distributed.new_group(backend="gloo")}
random = torch.Generator().manual_seed(rank)
count = 30 + 5 * rank  # metrics that keep their inputs gather tensors of several shapes
scores = torch.rand(count, 4, generator=random)
classes = torch.randint(0, 4, (count,), generator=random)
found, wanted = torch.randn(2, count, generator=random)
METRICS = {
    "accuracy": (lambda **options: torchmetrics.Accuracy("multiclass", num_classes=4, **options), (scores, classes)),
    "confusion": (
        lambda **options: torchmetrics.ConfusionMatrix("multiclass", num_classes=4, **options),
        (scores, classes),
    ),
    "auroc": (lambda **options: torchmetrics.AUROC("multiclass", num_classes=4, **options), (scores, classes)),
    "mean error": (torchmetrics.MeanSquaredError, (found, wanted)),
    "r2": (torchmetrics.regression.R2Score, (found, wanted)),
    "spearman": (torchmetrics.SpearmanCorrCoef, (found, wanted)),
    "mean": (torchmetrics.MeanMetric, (found,)),
    "sum": (torchmetrics.SumMetric, (classes,)),
    "max": (torchmetrics.MaxMetric, (found,)),
    "min": (torchmetrics.MinMetric, (found,)),
    "cat": (torchmetrics.CatMetric, (found,)),
}
for name, (make, inputs) in METRICS.items():
    values = {}
    for group_name, group in groups.items():
        metric = make(process_group=group)
        metric.update(*inputs)
        values[group_name] = metric.compute()
    assert torch.equal(values[backend], values["gloo"]), f"{name}: {values}"
metric = torchmetrics.CatMetric()
metric.update(found)
value = metric.compute()  # synchronized by the default group
assert torch.equal(value, values["gloo"])
assert value.numel() == sum(30 + 5 * each for each in range(torch.distributed.get_world_size()))
if rank == 0:
    print(json.dumps({"metrics": len(METRICS)}))
torch.distributed.destroy_process_group()
del groups, group  # they end before the interpreter does
