"""Drawing of schedules, as SVG pictures and as text.

A picture shows which rank waits for which, when a sum is complete and where links cross, which numbers hide.
``write_svg`` draws a picture, ``terminal`` formats plain text; neither needs a plotting library.
"""

from .message import DrawnMessage, caption, messages, numbers, svg_file
from .svg import write_svg
from .text import describe_contract, terminal

__all__ = ["DrawnMessage", "caption", "describe_contract", "messages", "numbers", "svg_file", "terminal", "write_svg"]
