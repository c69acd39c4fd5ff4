"""Put msprobe's names of calls into node keys.

    Module.{path}.{Class}.forward.{n}        path/forward#n          (also Cell.)
    Module.{path}.{Class}.backward.{n}       path/backward#n
    Module.{path}.{Class}.parameters_grad.k  path/parameters_grad#k
    {Prefix}.{api}.{n}.forward               {module}/{api}#m           module from construct.json, empty without it
    {Prefix}.{api}.{n}.backward              {module}/{api}.backward#m
    {name}.{n}.debug                         name/debug#n

Functions are counted anew, per module and name in order of execution, as our own traces count them: msprobe counts
over the whole step, so that one function that a fusion removes would shift all that follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_MODULE = re.compile(r"^(?:Module|Cell)\.(?P<path>.+)\.(?P<kind>[^.]+)\.(?P<op>forward|backward)\.(?P<call>\d+)$")
_GRADIENTS = re.compile(r"^(?:Module|Cell)\.(?P<path>.+)\.(?P<kind>[^.]+)\.parameters_grad(?:\.(?P<call>\d+))?$")
_FUNCTION = re.compile(r"^(?P<prefix>[^.]+)\.(?P<api>.+)\.(?P<call>\d+)\.(?P<way>forward|backward)$")
_DEBUG = re.compile(r"^(?P<path>.+)\.(?P<call>\d+)\.debug$")
_FORBIDDEN = re.compile(r"[/#:]")
# As our own traces name operators (`naming`, which cannot be imported here: it needs torch).
OPERATORS = {
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_", "radd": "add", "rsub": "sub",
    "rmul": "mul", "rtruediv": "div", "truediv": "div", "rpow": "pow", "rmatmul": "matmul",
}  # fmt: skip


class CallName(NamedTuple):
    """Where a call's nodes go: module path, operation, count, and the module's class or the function's full name."""

    path: str
    op: str
    call: int
    type_name: str
    is_module: bool = False
    is_backward: bool = False


class CallNames:
    """Turn the keys of one step's dump.json into call names, in order; keeps count of functions."""

    def __init__(self, parents: Mapping[str, str | None]) -> None:
        self._parents = parents
        self._counts: Counter[tuple[str, str]] = Counter()
        self._forward: dict[tuple[str, str, str], tuple[str, int]] = {}

    def name(self, key: str) -> CallName | None:
        """The call a key speaks of; None when it has no known form."""
        if match := _MODULE.match(key):
            way = match["op"]
            return CallName(match["path"], way, int(match["call"]), match["kind"], True, way == "backward")
        if match := _GRADIENTS.match(key):
            return CallName(match["path"], "parameters_grad", int(match["call"] or 0), match["kind"], True, True)
        if match := _FUNCTION.match(key):
            return self._function(key, match)
        if match := _DEBUG.match(key):
            return CallName(match["path"], "debug", int(match["call"]), "")
        return None

    def _function(self, key: str, match: re.Match[str]) -> CallName:
        prefix, api = match["prefix"], operation_name(match["api"])
        is_backward = match["way"] == "backward"
        op = f"{api}.backward" if is_backward else api
        identity = (prefix, match["api"], match["call"])
        if is_backward and identity in self._forward:
            path, call = self._forward[identity]
        else:
            path = self._module_of(key)
            call = self._counts[path, op]
            self._counts[path, op] += 1
            if not is_backward:
                self._forward[identity] = path, call
        return CallName(path, op, call, f"{prefix}.{match['api']}", False, is_backward)

    def _module_of(self, key: str) -> str:
        """Path of the innermost module that ran the function."""
        seen: set[str] = set()
        parent = self._parents.get(key)
        while isinstance(parent, str) and parent not in seen:
            seen.add(parent)
            if match := _MODULE.match(parent):
                return match["path"]
            parent = self._parents.get(parent)
        return ""


def operation_name(api: str) -> str:
    """Name of a function in keys: `__add__` is `add`, `__iadd__` is `add_`."""
    plain = api.strip("_") if api.startswith("__") else api
    return _FORBIDDEN.sub("_", OPERATORS.get(plain, plain) if api.startswith("__") else plain)
