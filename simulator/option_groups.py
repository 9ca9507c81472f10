"""Commands whose options are the fields of dataclasses: typer itself reads options from single parameters only."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, whose parameters are dataclasses, as a command with one option per field of them all.

    A field is annotated as the parameter would be: `Annotated[int, typer.Option(...)] = 1`.
    """
    groups = {name: group for name, group in get_type_hints(command).items() if name != "return"}
    fields = [(group, field) for group in groups.values() for field in dataclasses.fields(group)]
    hints = {
        name: hint
        for group in groups.values()
        for name, hint in get_type_hints(group, include_extras=True).items()
    }

    def run(**values: Any) -> None:
        made = {name: group(**_own(group, values)) for name, group in groups.items()}
        command(**made)

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for _, field in fields
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _own(group: type, values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(group)}
