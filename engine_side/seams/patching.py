"""Wrap attributes of modules when they are imported, once, and say clearly what was not found."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import StartError

Callback = Callable[[types.ModuleType], None]
Make = Callable[[Callable[..., Any]], Callable[..., Any]]  # of the original what takes its place


class _Finder(importlib.abc.MetaPathFinder):
    """Runs callbacks right after a module's own code has run."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
                  ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path
                  if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            # Only now: the module may have been looked for without being imported, or have failed on the first try.
            for callback in self.waiting.pop(fullname, ()):
                callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if ``name`` is imported, else when it is; StartError where there is none."""
    if name in sys.modules:
        callback(sys.modules[name])
        return
    if not is_there(name):
        raise StartError(f"vllm-tap: looked for the module {name}, not found; {_no_seam()}")
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.waiting.setdefault(name, []).append(callback)


def wrap_when_imported(name: str, wrappers: Mapping[str, Make]) -> None:
    """``wrap`` what lies at each path below the module ``name`` once that is imported."""

    def wrap_all(module: types.ModuleType) -> None:
        for path, make in wrappers.items():
            wrap(module, path, make)

    when_imported(name, wrap_all)


def is_there(name: str) -> bool:
    """Whether a module has a file, without importing what lies above it."""
    top, *below = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not below:
        return spec is not None
    places = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)


def declared_keys(name: str, *dictionaries: str) -> frozenset[str]:
    """The texts that are keys of ``dictionaries`` in the source of the module ``name``, which is not imported; none
    where there is no such module or dictionary.
    """
    top, *below = name.split(".")
    spec = importlib.util.find_spec(top)
    places = [Path(folder, *below).with_suffix(".py") for folder in (spec and spec.submodule_search_locations) or ()]
    found = set()
    for node in ast.parse(place.read_text()).body if (place := next(filter(Path.is_file, places), None)) else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and any(
                isinstance(target, ast.Name) and target.id in dictionaries for target in node.targets):
            found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return frozenset(map(str, found))


def wrap(owner: Any, path: str, make: Make) -> None:
    """Replace the attribute at ``path`` below a module or class by ``make(original)``, once.

    StartError, naming what was looked for and what lies beside it, where there is no such attribute.
    """
    *parents, name = path.split(".")
    for parent in parents:
        owner = _found(owner, parent)
    _found(owner, name, own=True)
    original = vars(owner)[name]
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original
    if is_wrapped(function):
        return
    replacement = make(function)
    functools.update_wrapper(replacement, function)
    replacement.vllm_tap = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(replacement) if is_classmethod else replacement)


def is_wrapped(function: Any) -> bool:
    """Whether a function is one that ``wrap`` made."""
    return bool(getattr(function, "vllm_tap", False))


def _found(owner: Any, name: str, own: bool = False) -> Any:
    """``owner.name`` (its ``own``, not inherited), or a StartError with names beside it that are spelled nearly so."""
    offered = set(vars(owner) if own else dir(owner))
    if name in offered:
        return getattr(owner, name)
    near = ", ".join(difflib.get_close_matches(name, offered, 4, 0.5)) or "nothing like it"
    place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    raise StartError(f"vllm-tap: looked for {name} in {place}, found {near}; {_no_seam()}")


def _no_seam() -> str:
    """The reason that ends every such error."""
    version = getattr(sys.modules.get("vllm"), "__version__", "of this environment")
    return f"vLLM {version} has no seam there that vllm-tap knows"
