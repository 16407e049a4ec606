"""Backends of torch.distributed over what else is installed."""

__all__: list[str] = []
