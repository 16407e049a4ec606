"""Drawing of schedules, as SVG pictures and as text.

A picture shows which rank waits for which, when a sum is complete and where links cross, which numbers hide.
``write_svg`` draws a picture, ``terminal`` formats plain text; neither needs a plotting library.
"""

from .link_loads import write_loads as write_loads
from .message import DrawnMessage as DrawnMessage
from .message import caption as caption
from .message import messages as messages
from .message import numbers as numbers
from .message import svg_file as svg_file
from .svg import write_svg as write_svg
from .text import describe_contract as describe_contract
from .text import terminal as terminal

__all__: list[str] = []
