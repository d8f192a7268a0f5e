"""Models: whole networks from the layers of ``nn``, as examples, benchmarks and starting points."""

from .feedforward import ConvNet, convnet, mlp
from .registry import describe_model, make_again
from .resnet import ResNet, resnet18, resnet50
from .transformer import GPT, gpt

__all__ = [
    "GPT",
    "ConvNet",
    "ResNet",
    "convnet",
    "describe_model",
    "gpt",
    "make_again",
    "mlp",
    "resnet18",
    "resnet50",
]
