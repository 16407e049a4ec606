"""One module for each exercise, with its task, hints and check."""

__all__: list[str] = []
