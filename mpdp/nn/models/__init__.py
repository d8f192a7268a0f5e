"""Models: whole networks from the layers of ``nn``, as examples, benchmarks and starting points."""

from .feedforward import ConvNet, convnet, mlp
from .resnet import ResNet, resnet18, resnet50
from .transformer import GPT, gpt

__all__ = ["GPT", "ConvNet", "ResNet", "convnet", "gpt", "mlp", "resnet18", "resnet50"]
