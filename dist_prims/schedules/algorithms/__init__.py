"""The algorithms: one file and one cost card each. Importing a module registers the algorithms that it defines."""

__all__: list[str] = []
