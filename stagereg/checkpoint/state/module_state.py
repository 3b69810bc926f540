"""Saves and loads the state of modules, under parameter names without the prefixes of wrappers.

``DistributedDataParallel``, ``DataParallel``, ``torch.compile``, activation checkpointing and FSDP1 wrap modules, and
add a prefix to the names inside. :func:`plain_name` removes this prefix, as torch's ``get_model_state_dict`` does. So a
state that was saved with a wrapper can be restored without the wrapper, and vice versa. If an entry is a list of
modules, such as the pipeline stages of a rank, they share one state dict, so their parameters must have different
names.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from stagereg.checkpoint.format.split_tensors import carry, is_split
from stagereg.errors import CheckpointError

_PARALLEL = (DataParallel, DistributedDataParallel)
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_MAY_BE_WRAPPED = re.compile(rf"(^|\.)(module|{'|'.join(_WRAPPED)})(\.|$)")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(module, _PARALLEL):
            module = module.module
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        else:
            return module


def modules_of(value: Any) -> list[torch.nn.Module]:
    """Return the unwrapped modules of ``value``, which is a module or a list of modules; otherwise an empty list."""
    each = list(value) if isinstance(value, (list, tuple)) else [value]
    return [unwrapped(one) for one in each] if all(isinstance(one, torch.nn.Module) for one in each) else []


def plain_name(module: torch.nn.Module, name: str) -> str:
    """Return a dotted name in ``module`` without the prefixes of wrappers."""
    if not _MAY_BE_WRAPPED.search(name):
        return name
    parts, at = [], module
    for part in name.split("."):
        is_wrapper = part == "module" and isinstance(at, _PARALLEL)
        if not is_wrapper and part not in _WRAPPED:
            parts.append(part)
        at = getattr(at, part, None)  # type: ignore[assignment]
    return ".".join(parts)


def without_wrappers(name: str) -> str:
    """Return a saved name without wrapper prefixes. Keeps ``module``, because a submodule may have this name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def names_of(modules: Iterable[torch.nn.Module]) -> tuple[dict[torch.Tensor, str], dict[str, str]]:
    """Return the first name of each parameter, and a dict from other names of tied parameters to the first name."""
    names: dict[torch.Tensor, str] = {}
    others: dict[str, str] = {}
    for module in modules:
        for name, param in module.named_parameters(remove_duplicate=False):
            plain = plain_name(module, name)
            if names.setdefault(param, plain) != plain:
                others[plain] = names[param]
    return names, others


def is_extra_state(name: str) -> bool:
    """Return whether a dotted name is the key of a ``get_extra_state`` result. Such a result may have any type."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def extra_states(modules: Iterable[torch.nn.Module]) -> set[str]:
    """Return the dotted keys of the extra states. Only modules that define ``set_extra_state`` have one."""
    return {plain_name(module, key) for module in modules for key in _extra_keys(module)}


def _extra_keys(module: torch.nn.Module) -> list[str]:
    return [
        f"{path}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip(".")
        for path, inner in module.named_modules(remove_duplicate=False)
        if type(inner).set_extra_state is not torch.nn.Module.set_extra_state
    ]


def unfilled(x: torch.Tensor) -> str:
    """Return why ``copy_`` cannot write to a tensor, as the end of a sentence; an empty string if it can."""
    local = x.to_local() if isinstance(x, DTensor) else x
    if is_lazy(local) or type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return ""  # a lazy tensor takes its shape from the checkpoint; a subclass has its own copy_
    if local.is_meta:
        return "is on the meta device, which has no memory. Allocate memory first, for example by to_empty()"
    if local.layout is not torch.strided:
        return f"is {local.layout}, not dense"
    if torch._debug_has_internal_overlap(local) == 1:
        return "has several elements at one address, for example after expand(). Copy it with clone()"
    if local.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(). Make it outside, or restore inside"
    return ""


def has_flat_parameters(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether FSDP1 has flattened parameters of any module. Only torch can merge the state of such modules."""
    return any(isinstance(each, FullyShardedDataParallel) for each in _every(modules))


def _every(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    left = [*modules]  # faster than modules(), which also builds names
    while left:
        yield (module := left.pop())
        left += [each for each in module._modules.values() if each is not None]


def state_of(modules: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return the merged state dict of the modules. It contains the live tensors. Collective only with FSDP1.

    Raises:
        CheckpointError: two modules have a parameter or buffer of the same name.
    """
    states = [_state(module) for module in modules]
    if len(states) == 1:
        return states[0]
    whole: OrderedDict[str, Any] = OrderedDict()
    for state in states:
        if twice := sorted(whole.keys() & state.keys()):
            raise CheckpointError(
                f"Two of its modules have a parameter or buffer named {twice[0]!r}. Put the modules into a dict under "
                "different names, or give the parameters different names."
            )
        whole.update(state)
    _set_versions(whole, {path: each for state in states for path, each in _versions(state).items()})
    return whole


def _state(module: torch.nn.Module) -> dict[str, Any]:
    if has_flat_parameters([module]):
        return get_model_state_dict(module)
    state: dict[str, Any] = module.state_dict()
    if any(map(is_split, chain.from_iterable(each._parameters.values() for each in _every([module])))):
        for name, param in module.named_parameters(remove_duplicate=False):
            if isinstance(state.get(name), torch.Tensor):  # torch 2.13 drops the tensor's shard attributes
                carry(param, state[name])
    if not any(map(_MAY_BE_WRAPPED.search, state)):
        return state
    names = [plain_name(module, key) for key in state]
    plain: OrderedDict[str, Any] = OrderedDict(zip(names, state.values(), strict=True))
    if len(plain) < len(state):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CheckpointError(f"Without the prefixes of wrappers, two values of the module are named {twice!r}.")
    _set_versions(plain, {plain_name(module, path): each for path, each in _versions(state).items()})
    return plain


def load(modules: Sequence[torch.nn.Module], loaded: Mapping[str, Any], missing: Sequence[str] = ()) -> None:
    """Load a result of :func:`state_of`. Parameters in ``missing`` keep their values. Errors of torch propagate."""
    versions, left = _versions(loaded), dict(loaded)
    new = {name.rpartition(".")[0] for name in missing}  # names of submodules with missing values
    for module in modules:
        if has_flat_parameters([module]):
            current = get_model_state_dict(module) if missing else {}
            set_model_state_dict(module, {**loaded, **{name: current[name] for name in missing}})
            continue
        live = module.state_dict()
        plain = [(key, plain_name(module, key)) for key in dict.fromkeys([*live, *_extra_keys(module)])]
        left |= {name: live[key] for key, name in plain if name in missing}  # missing values stay as they are
        own = OrderedDict((key, left.pop(name)) for key, name in plain if name in left)
        if module is modules[-1]:  # the last module rejects or handles the names that no module has
            own.update(left)
        paths = {path: plain_name(module, path) for path in _versions(live)}
        own_versions = {path: each for path, each in _versions(live).items() if paths[path] in new}
        _set_versions(own, own_versions | {path: versions[name] for path, name in paths.items() if name in versions})
        module.load_state_dict(own)


def _versions(state: Mapping[str, Any]) -> dict[str, Any]:
    return getattr(state, "_metadata", None) or {}


def _set_versions(state: OrderedDict[str, Any], versions: dict[str, Any]) -> None:
    state._metadata = versions  # type: ignore[attr-defined]
