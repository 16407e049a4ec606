"""Pipeline plans: the order in which each rank computes the stages of each micro-batch. No torch and no I/O.

A plan can be proved, priced and drawn; :mod:`dist_prims.training.pipeline` runs it.
"""

from .actions import Action
from .catalogue import markdown_table, show
from .cost import PipelineCost, Row, predict
from .draw import draw_gantt, text_gantt
from .plan import PipelinePlan, pipeline_plan
from .registry import PipelineCard, pipeline_plans, pipeline_schedule, unregister

__all__ = [
    "Action",
    "PipelineCard",
    "PipelineCost",
    "PipelinePlan",
    "Row",
    "draw_gantt",
    "markdown_table",
    "pipeline_plan",
    "pipeline_plans",
    "pipeline_schedule",
    "predict",
    "show",
    "text_gantt",
    "unregister",
]
