"""One algorithm, one file, one cost card. Each module registers what it defines when it is imported."""

__all__: list[str] = []
