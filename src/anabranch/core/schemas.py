"""The shape of state: stages, their keys and their state variables, and the columns in which rows of state travel."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import pyarrow as pa

from anabranch.core.ids import StageNumber

#: xxhash64 of the key, as Spark computes it; every row of state carries it.
HASH = "_hash"
#: The key group, in change files and snapshots.
GROUP = "_group"
#: What a change does; see Op.
OP = "_op"
#: The position of an element of a list state variable.
POSITION = "_position"
#: In answers to a read: the position of the row's key in the request.
INDEX = "_index"
#: In a field's metadata: what its values are, if name and type do not tell. Values of one meaning are no values of
#: another, whatever their type: a sum is not a maximum.
MEANING = b"anabranch.meaning"


#: The traits of a stage.
OPERATOR, JOIN_TYPE, TIME_MODE, OUTPUT_MODE = "operator", "join type", "time mode", "output mode"


#: The operator of a StatefulProcessor, whatever the form of its rows.
PROCESSOR = "transformWithState"


class Op:
    """What one row of a change does. Of one key, the CLEAR comes before everything else."""

    PUT = 0  #: set the entry (of a value variable: the value)
    DELETE = 1  #: remove the entry
    CLEAR = 2  #: remove all entries of the key; the sub-key and value columns are null


class VariableKind(StrEnum):
    """How many entries a key has in a state variable, and what tells them apart."""

    VALUE = "value"  #: at most one entry
    LIST = "list"  #: entries by position
    MAP = "map"  #: entries by map key


@dataclass(frozen=True)
class VariableSpec:
    """A named, typed piece of a stage's state."""

    name: str
    kind: VariableKind
    #: The value fields.
    value: pa.Schema
    #: The fields of the map key; empty unless kind is MAP.
    map_key: pa.Schema = field(default_factory=lambda: pa.schema([]))
    #: Value fields that it once had: files may have them still.
    dropped: pa.Schema = field(default_factory=lambda: pa.schema([]))

    @property
    def whole(self) -> VariableSpec:
        """The same variable with all value fields that files may have."""
        return replace(self, value=pa.schema([*self.value, *self.dropped]), dropped=pa.schema([]))


@dataclass(frozen=True)
class StageSpec:
    """A stateful stage: its key and its state variables."""

    number: StageNumber
    name: str
    key: pa.Schema
    variables: tuple[VariableSpec, ...]
    #: What else the meaning of its state depends on, such as the operator and the type of a join, each under a name.
    traits: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: State variables that it asks to be deleted, if there is anything of them.
    deleted: tuple[str, ...] = ()
    #: Whether fields that its state variables have in a checkpoint may be gone, with their values. The query asks for
    #: it; it is no part of what the state is.
    may_drop_fields: bool = field(default=False, compare=False)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """The columns of each state variable's rows, by the variable's name."""
        return {variable.name: Layout(self.key, variable) for variable in self.variables}

    def numbered(self, number: StageNumber, name: str) -> StageSpec:
        """Returns the same stage under another number and name."""
        return replace(self, number=number, name=name)

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "name": self.name,
            "key": encode_schema(self.key),
            "traits": dict(self.traits),
            "deleted": list(self.deleted),
            "variables": [
                {
                    "name": variable.name,
                    "kind": str(variable.kind),
                    "map_key": encode_schema(variable.map_key),
                    "value": encode_schema(variable.value),
                    "dropped": encode_schema(variable.dropped),
                }
                for variable in self.variables
            ],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> StageSpec:
        return StageSpec(
            number=StageNumber(document["number"]),
            name=document["name"],
            key=decode_schema(document["key"]),
            # What older versions did not write has defaults.
            traits={str(name): str(value) for name, value in document.get("traits", {}).items()},
            deleted=tuple(document.get("deleted", ())),
            variables=tuple(
                VariableSpec(
                    name=variable["name"],
                    kind=VariableKind(variable["kind"]),
                    map_key=decode_schema(variable["map_key"]),
                    value=decode_schema(variable["value"]),
                    dropped=decode_schema(variable["dropped"]) if "dropped" in variable else pa.schema([]),
                )
                for variable in document["variables"]
            ),
        )


@dataclass(frozen=True)
class Layout:
    """The columns of a state variable's rows: hash, key fields, sub-key fields, value fields, in this order.

    Key fields keep the user's names. A sub-key or value field whose name is taken gets a prefix.
    """

    key: pa.Schema
    variable: VariableSpec

    @cached_property
    def key_names(self) -> list[str]:
        return list(self.key.names)

    @cached_property
    def subkey(self) -> pa.Schema:
        """What tells the entries of one key apart: nothing, the list position, or the map key."""
        if self.variable.kind is VariableKind.LIST:
            return pa.schema([pa.field(POSITION, pa.int64())])
        return _renamed(self.variable.map_key, prefix="map_key.", taken=self.key_names)

    @cached_property
    def value(self) -> pa.Schema:
        return _renamed(self.variable.value, prefix="value.", taken=[*self.key_names, *self.subkey.names])

    @cached_property
    def dropped(self) -> frozenset[str]:
        """Columns that only old files have."""
        return frozenset(Layout(self.key, self.variable.whole).value.names) - frozenset(self.value.names)

    @cached_property
    def keys(self) -> pa.Schema:
        """What a task sends to read state."""
        return pa.schema([pa.field(HASH, pa.int64()), *self.key])

    @cached_property
    def rows(self) -> pa.Schema:
        """Whole rows of state."""
        return pa.schema([*self.keys, *self.subkey, *self.value])

    @cached_property
    def changes(self) -> pa.Schema:
        """What a task sends to change state."""
        return pa.schema([pa.field(HASH, pa.int64()), pa.field(OP, pa.int8()), *list(self.rows)[1:]])

    @cached_property
    def answers(self) -> pa.Schema:
        """What a worker answers to a read: the entries of the keys that have any, ordered by INDEX."""
        return pa.schema([pa.field(INDEX, pa.int32()), *self.subkey, *self.value])

    @cached_property
    def files(self) -> pa.Schema:
        """The columns of change files, which are sorted by GROUP."""
        return pa.schema([pa.field(GROUP, pa.int32()), *self.changes])


def _renamed(schema: pa.Schema, *, prefix: str, taken: Iterable[str]) -> pa.Schema:
    """Renames fields whose names are taken, by others or by their neighbours."""
    names = set(taken)
    fields = []
    for field_ in schema:
        name = field_.name
        while name in names or (name != field_.name and name in schema.names):
            name = prefix + name
        names.add(name)
        fields.append(field_.with_name(name))
    return pa.schema(fields)


def encode_schema(schema: pa.Schema) -> str:
    """A schema as text, for documents and requests."""
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
