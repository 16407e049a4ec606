"""Pipeline plans: the order in which each rank computes the stages of each micro-batch. No torch and no I/O.

A plan can be proved, priced and drawn; :mod:`dist_prims.training.pipeline` runs it.
"""

from .actions import Action
from .catalogue import markdown_table as markdown_table
from .catalogue import show as show
from .cost import PipelineCost, predict
from .cost import Row as Row
from .draw import draw_gantt
from .draw import text_gantt as text_gantt
from .plan import PipelinePlan, pipeline_plan
from .registry import PipelineCard, pipeline_plans, pipeline_schedule, unregister

__all__ = [
    "Action",
    "PipelineCard",
    "PipelineCost",
    "PipelinePlan",
    "draw_gantt",
    "pipeline_plan",
    "pipeline_plans",
    "pipeline_schedule",
    "predict",
    "unregister",
]
