"""Everything that follows from a configuration, in pure Python. Imports no torch."""

from typing import Any

from pentameter.callable_module import make_callable


def _plan(*arguments: Any, **options: Any) -> Any:
    """`pentameter.plan.plan.make_plan`, imported when it is called."""
    from pentameter.plan.plan import make_plan

    return make_plan(*arguments, **options)


make_callable(__name__, _plan)
