"""Name modules, calls and output slots so that every run of one model yields the same keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPER_CLASSES = frozenset({
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "ActivationWrapper", "DeepSpeedEngine",
    "Float16Module",
})  # fmt: skip

# Spelled as methods or operators in user code, one name in keys.
_ALIASES = {
    "matmul": "matmul", "rmatmul": "matmul", "rpow": "pow", "truediv": "div", "rtruediv": "div", "rdiv": "div",
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rsub": "sub", "rmul": "mul",
    "radd": "add", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "idiv": "div_", "ipow": "pow_",
    "negative": "neg", "absolute": "abs", "concat": "cat", "concatenate": "cat", "clip": "clamp",
    "batch_norm": "batch_norm", "silu_": "silu_",
}  # fmt: skip


class CallUse(Enum):
    """What a torch function does with its tensors, as far as the wire cares."""

    COMPUTE = "compute"  # may yield tensors: a node
    READ = "read"  # hands values to Python: not a node, but a reader
    METADATA = "metadata"  # looks at shape, dtype, device: nothing


_READS = frozenset({
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__iter__",
    "__contains__", "__reduce_ex__", "__deepcopy__", "equal", "allclose", "is_nonzero", "__dlpack__", "backward",
})  # fmt: skip
_METADATA = frozenset({
    "size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "storage_offset", "data_ptr", "storage",
    "untyped_storage", "get_device", "type", "__len__", "__repr__", "__str__", "__format__", "__hash__",
    "__dir__", "__sizeof__",
    "requires_grad_", "retain_grad", "register_hook", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
    "is_pinned", "is_inference", "is_conj", "is_neg", "is_same_size", "is_tensor", "is_storage", "is_shared",
    "is_set_to",
    "is_coalesced", "is_distributed", "has_names", "result_type", "can_cast", "promote_types", "dim_order",
    "__dlpack_device__",
    "__subclasscheck__", "_is_view", "_fused_sdp_choice", "get_default_dtype", "broadcast_shapes", "isinstance",
    "__setstate__", "_version", "names", "sparse_dim", "dense_dim", "nbytes", "itemsize", "set_default_dtype",
    "__setitem_meta__", "_has_compatible_shallow_copy_type", "is_autocast_enabled", "_nested_tensor_size",
})  # fmt: skip
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})


@dataclasses.dataclass(frozen=True, slots=True)
class OpName:
    """Short name of a torch function for keys, its qualified name for records, and what it does."""

    short: str
    qualified: str
    use: CallUse


_NAMES: dict[Any, OpName] = {}


def op_name(func: Callable[..., Any]) -> OpName:
    """Name a torch function as seen by a function mode; remembered per function."""
    try:
        return _NAMES[func]
    except KeyError:
        name = _NAMES[func] = _name(func)
        return name


def _name(func: Any) -> OpName:
    raw = getattr(func, "__name__", type(func).__name__)
    owner = getattr(func, "__self__", None)
    if raw in {"__get__", "__set__", "__delete__"} and owner is not None:
        attribute = getattr(owner, "__name__", "")
        computes = raw == "__get__" and attribute in _TENSOR_PROPERTIES
        return OpName(attribute, f"Tensor.{attribute}", CallUse.COMPUTE if computes else CallUse.METADATA)
    if raw in _METADATA:
        return OpName(raw, raw, CallUse.METADATA)
    if raw in _READS:
        return OpName(raw, raw, CallUse.READ)
    short = raw.strip("_") if raw.startswith("__") else raw
    packet = getattr(func, "_overloadpacket", func)  # an OpOverload such as aten.add.Tensor has one
    if packet is not func:
        short = packet.__name__
    qualified = getattr(packet, "_qualified_op_name", None) or f"{_home(func)}{raw}"
    return OpName(_ALIASES.get(short, short), str(qualified), CallUse.COMPUTE)


def _home(func: Any) -> str:
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.nn.functional") or module == "torch._C._nn":
        return "F."
    owner = getattr(func, "__objclass__", None)
    return "Tensor." if owner is not None else "torch."


def clean_path(path: str) -> str:
    """A module path without the names that wrappers insert (`module`, `_orig_mod`, ...)."""
    if not any(wrapper in path for wrapper in _WRAPPERS):
        return path
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def named_modules(root: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under its first name.

    Left out: wrappers (DataParallel, ...), so that keys are the same with and without them; the inside of sealed
    modules; and modules whose `id` is in `seen`, which is added to.
    """
    seen = set() if seen is None else seen
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        sealed = is_sealed(module)
        inner = None if sealed else wrapped_name(module)
        if inner is not None:
            stack.append((path, module._modules[inner]))  # type: ignore[arg-type]
            continue
        yield path, module
        if not sealed:
            children = [
                (f"{path}.{name}" if path else name, child)
                for name, child in module._modules.items()
                if child is not None
            ]
            stack.extend(reversed(children))


def can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward: containers (ModuleList, ParameterList, ...) have none."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in module.__dict__:
        return True
    return type(module).forward is not nn.Module.forward


def wrapped_name(module: nn.Module) -> str | None:
    """Name of the one child that a wrapper stands for; None for any other module."""
    if len(module._modules) != 1:
        return None
    name, child = next(iter(module._modules.items()))
    is_wrapper = (
        name in _WRAPPERS
        and child is not None
        and any(base.__name__ in _WRAPPER_CLASSES for base in type(module).__mro__)
    )
    return name if is_wrapper else None


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or TorchScript owns this module's inside, so that only its outputs can be seen."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules:
        return True
    forward = module.__dict__.get("forward") or type(module).forward
    return hasattr(forward, "_torchdynamo_orig_callable")


def is_sealed(module: nn.Module) -> bool:
    """Whether only a module's outputs can be seen: it is compiled,
    or runs copies of its children on several devices."""
    return is_compiled(module) or (isinstance(module, nn.DataParallel) and len(module.device_ids) > 1)


# What most arguments are besides tensors: nothing to look into.
_LEAVES = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, slice, type(...)}
)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, in order; `walk_tensors` without the names."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) is tuple or type(value) is list:
        for item in value:
            if type(item) not in _LEAVES:
                _collect(item, found)
    elif type(value) is dict:
        for item in value.values():
            if type(item) not in _LEAVES:
                _collect(item, found)
    elif type(value) not in _LEAVES:
        found.extend(tensor for _, tensor in walk_tensors(value))


def walk_tensors(value: Any, slot: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (slot, tensor) of every tensor in tuples, lists, mappings, dataclasses and named tuples, in order.

    A lone tensor has slot "0"; nested slots are joined by dots: `1.hidden`.
    """
    if isinstance(value, torch.Tensor):
        yield slot or "0", value
    elif type(value) in _LEAVES:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk_tensors(item, _join(slot, key))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from walk_tensors(getattr(value, name), _join(slot, name))
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from walk_tensors(item, _join(slot, position))
    else:
        yield from _walk_attributes(value, slot)


def _walk_attributes(value: Any, slot: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dataclass, or those directly in a plain object's attributes: one level, so no cycle is followed."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from walk_tensors(getattr(value, entry.name, None), _join(slot, entry.name))
        return
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (nn.Module, type)) or callable(value):
        return
    for name, item in attributes.items():
        if isinstance(item, torch.Tensor):
            yield _join(slot, name), item


def _join(slot: str, key: object) -> str:
    text = str(key)
    return f"{slot}.{text}" if slot else text


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Rebuild a nested value with every tensor changed; containers whose tensors stay the same are kept as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        items = [map_tensors(item, change) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        pairs = {key: map_tensors(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in value):
            return value
        if type(value) is dict:
            return pairs
        return _refill(value, pairs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        if all(fields[name] is getattr(value, name) for name in fields):
            return value
        return dataclasses.replace(value, **fields)
    return value


def _refill(value: dict[Any, Any], pairs: dict[Any, Any]) -> dict[Any, Any]:
    """A mapping of the same class with new items; a dataclass that is also a mapping is filled by its constructor."""
    if dataclasses.is_dataclass(value):
        return type(value)(**{str(key): item for key, item in pairs.items()})
    new = type(value)()
    new.update(pairs)
    return new
