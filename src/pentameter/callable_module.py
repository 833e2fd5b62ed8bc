"""Packages that are also functions: `pm.generate(model, …)` beside `pentameter.generate.loop`.

Importing a subpackage binds its name in the parent, over any function of that name. So the
package itself is made callable, by the way Python documents for modules: a class of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Let the imported module `module_name` be called as `function`."""

    class CallableModule(ModuleType):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options)

    CallableModule.__call__.__doc__ = function.__doc__
    sys.modules[module_name].__class__ = CallableModule
