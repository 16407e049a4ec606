"""The name of the backend of ``torch.distributed``, in a module that imports nothing: ``autoload.py`` must be quick."""

__all__: list[str] = []

NAME = "dist_prims"
