"""Tables of a run in a notebook: for what is not there ``pandas`` has ``<NA>``, ``NaN`` and ``None``, people ``-``."""

import pandas as pd

_MISSING = "-"


class Table(pd.DataFrame):
    """A DataFrame that shows what is missing in one way; its values are those that ``pandas`` has."""

    @property
    def _constructor(self) -> type["Table"]:
        return Table

    def __repr__(self) -> str:
        return repr(_shown(self))

    def _repr_html_(self) -> str | None:
        return _shown(self)._repr_html_()  # noqa: SLF001  (IPython's protocol)


def _shown(table: Table) -> pd.DataFrame:
    columns = [_column(table.iloc[:, place]) for place in range(table.shape[1])]
    return pd.concat(columns, axis=1) if columns else pd.DataFrame(index=table.index)


def _column(column: pd.Series) -> pd.Series:
    if not column.isna().any():
        return column
    form = "{:.6g}" if pd.api.types.is_float_dtype(column) else "{}"
    values = [_MISSING if missing else form.format(value) for value, missing in zip(column, column.isna(), strict=True)]
    return pd.Series(values, column.index, dtype=object, name=column.name)
