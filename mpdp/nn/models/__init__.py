"""Models: whole networks from the layers of ``nn``, as examples, benchmarks and starting points."""

from .gpt import GPT

__all__ = ["GPT"]
