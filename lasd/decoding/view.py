"""Views of a model: shallow copies of its modules that share every weight, so that a view can be changed and the model
not."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lasd.errors import LasdError


def unwrapped(model: Any) -> PreTrainedModel:
    """The causal LM inside the wrappers of `torch.compile` and peft; adapters stay in force.

    Raises:
        LasdError: an adapter that adds tokens of its own instead of changing layers.
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
            raise LasdError(
                f"the adapter is of type {str(config.peft_type).rpartition('.')[2]}, which adds tokens of its own to "
                "the cache; lasd decodes with adapters that change layers, such as LoRA"
            )
    return model.get_base_model()


Model = TypeVar("Model", bound=nn.Module)


def model_view(model: Model) -> Model:
    """Copies the module tree, not the weights. Configs are copied too (one copy each, shared as in the original).

    A module's parameters and buffers are the original's own tensors; replacing a sub-module or a config field of the
    view does not touch the model. Forward functions that accelerate wrapped around a module are bound to the copy; what
    torch.compile made of the model stays with the model, the copy runs eagerly.

    Raises:
        LasdError: a module with sub-modules has a forward function of its own that cannot be bound to the copy.
    """
    configs: dict[int, Any] = {}
    copies: dict[int, nn.Module] = {}

    def copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            for name, part in vars(config).items():
                if isinstance(part, PreTrainedConfig):
                    configs[id(part)] = getattr(configs[id(config)], name)
        return configs[id(config)]

    def copy_module(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        twin = module.__class__.__new__(module.__class__)
        copies[id(module)] = twin
        state = dict(module.__dict__)
        for name, value in state.items():
            if isinstance(value, PreTrainedConfig):
                state[name] = copy_config(value)
        state["_modules"] = {
            name: child if child is None else copy_module(child) for name, child in module._modules.items()
        }
        state["_parameters"] = dict(module._parameters)
        state["_buffers"] = dict(module._buffers)
        twin.__dict__ = state
        _rebind(module, twin, state)
        return twin

    return cast(Model, copy_module(model))


def _rebind(module: nn.Module, twin: nn.Module, state: dict[str, Any]) -> None:
    """Functions that are bound to the original (accelerate's wrapped forwards) become bound to the copy."""
    state["_compiled_call_impl"] = None
    for name in ("_old_forward", "forward"):
        function: Callable | None = state.get(name)
        function = getattr(function, "_torchdynamo_orig_callable", function)
        if getattr(function, "__self__", None) is module:
            state[name] = function.__func__.__get__(twin)  # type: ignore[union-attr]
        elif isinstance(function, partial) and module in function.args:
            bound = partial(
                function.func, *(twin if arg is module else arg for arg in function.args), **function.keywords
            )
            bound.__dict__.update(function.__dict__)
            state[name] = bound
        elif function is not None and module._modules:
            name = getattr(function, "__qualname__", repr(function))
            raise LasdError(
                f"the forward of a {type(module).__name__} was replaced by {name}, which lasd cannot bind to its own "
                "copy of the module; hand the model over before it is patched"
            )
