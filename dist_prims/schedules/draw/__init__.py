"""Schedules as pictures and as text.

Steps as numbers are hard to see through: which rank waits for which, when a sum is complete, where links cross.
``write_svg`` draws it, ``terminal`` says it in plain text, and neither needs a plotting library.
"""

from .message import Message, caption, messages, numbers, svg_file
from .svg import write_svg
from .text import promise, terminal

__all__ = ["Message", "caption", "messages", "numbers", "promise", "svg_file", "terminal", "write_svg"]
