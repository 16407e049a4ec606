"""Schedules of other projects: MSCCL algorithms as XML, MSCCL++ execution plans as JSON."""

__all__: list[str] = []
