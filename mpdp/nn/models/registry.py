"""Registry: how a model of ``nn.models`` was made, so that it can be made again from text.

A registered function leaves its name and arguments on the model it returns. What is made again is compared with what
was described, module by module: a model that was changed after it was made is not taken for the original.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from typing import Any, TypeVar

import numpy as np

from ..module import Module

_M = TypeVar("_M", bound=Module)


def registered(function: Callable[..., _M]) -> Callable[..., _M]:
    """Let the models that a function returns be made again from its name and arguments. **Local.**"""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> _M:
        model = function(*args, **kwargs)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        try:
            text = json.dumps(arguments, default=_as_json, allow_nan=False)
            model.made_by = {"function": function.__name__, "arguments": json.loads(text)}
        except (TypeError, ValueError):
            model.made_by = None  # made of what has no text; whoever wants it again makes it
        return model

    return make


def _functions() -> dict[str, Callable[..., Module]]:
    from . import feedforward, resnet, transformer  # they import this module

    known = (feedforward.convnet, transformer.gpt, feedforward.mlp, resnet.resnet18, resnet.resnet50)
    return {function.__name__: function for function in known}


def describe_model(model: Module) -> dict[str, Any]:
    """Return what a checkpoint says of a model: its modules by name and class, and how it was made. **Local.**"""
    return {
        "made_by": getattr(model, "made_by", None),
        "modules": [
            [name, f"{type(module).__module__}.{type(module).__qualname__}"]
            for name, module in model.named_modules()
        ],
    }


def make_again(description: Mapping[str, Any], most: int) -> Module:
    """Return a new model of the form that :func:`describe_model` has described, with initial weights.

    **Local.** Only functions of ``nn.models`` are called.

    Args:
        description: may come from a file that somebody else wrote.
        most: no number among the arguments may be larger; as many elements as the weights are known to have.

    Raises:
        ValueError: it was not made by a function of ``nn.models``, or was changed afterwards.
    """
    made_by, functions = description.get("made_by"), _functions()
    if not isinstance(made_by, Mapping) or str(made_by.get("function")) not in functions:
        raise ValueError(
            f"model: expected one made by nn.models ({', '.join(functions)}), got another; pass model="
        )
    arguments = made_by.get("arguments")
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(f"model: expected arguments by name, got {str(arguments)[:80]}; pass model=")
    for number in _numbers(arguments):
        if not 0 <= number <= most:
            raise ValueError(f"model: expected arguments of 0 to {most}, got {number}; pass model=")
    try:
        make = functions[str(made_by["function"])]
        model = copy_context().run(
            lambda: make(**arguments)
        )  # parameters made later keep their initial values
    except (TypeError, ValueError, ZeroDivisionError, MemoryError) as error:
        raise ValueError(
            f"model: expected arguments of nn.models.{made_by['function']}, got {str(arguments)[:200]} ({error}); "
            "pass model="
        ) from error
    if describe_model(model)["modules"] != description.get("modules"):
        raise ValueError(
            f"model: expected the modules that nn.models.{made_by['function']} makes, got a model that was changed "
            "afterwards; make it as you did then, and pass model="
        )
    return model


def _as_json(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype | type):
        return np.dtype(value).name
    raise TypeError(f"{value!r} has no text")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list | tuple):
        yield len(value)
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value
