"""Plans of pipelines: in which order each rank computes the stages of which micro-batch; no torch and no I/O.

A plan proves, prices and draws itself; :mod:`dist_prims.training.pipeline` runs it.
"""

from .catalogue import markdown_table, show
from .cost import PipelineCost, Row, foretold
from .draw import draw_gantt, text_gantt
from .plan import Action, PipelinePlan
from .registry import PipelineCard, pipeline_plan, pipeline_plans, pipeline_schedule, unregister

__all__ = [
    "Action",
    "PipelineCard",
    "PipelineCost",
    "PipelinePlan",
    "Row",
    "draw_gantt",
    "foretold",
    "markdown_table",
    "pipeline_plan",
    "pipeline_plans",
    "pipeline_schedule",
    "show",
    "text_gantt",
    "unregister",
]
