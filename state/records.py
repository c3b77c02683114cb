"""What our immutable records share: how they are filled, and how one is made from another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Record", "set_fields"]


def set_fields(record: Any, **values: Any) -> None:
    """Fill a frozen record from its own ``__init__``.

    The ``__init__`` that attrs writes for a frozen class cannot be traced by Dynamo; this can.
    """
    for name, value in values.items():
        object.__setattr__(record, name, value)


class Record:
    """Base of a frozen attrs class with an ``__init__`` of its own."""

    def replace(self, **changes: Any) -> Self:
        """A new record with some fields changed.

        Raises:
            TypeError: naming a field that does not exist.
        """
        cls: Any = type(self)
        names = [field.name for field in attrs.fields(cls)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(names)}")
        made: Self = cls(**{name: changes[name] if name in changes else getattr(self, name) for name in names})
        return made
