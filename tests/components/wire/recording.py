"""One of every message as bytes, and its schema: what a release sends and accepts.

    python -m tests.components.wire.recording tests/components/wire/recorded/protocol-<PROTOCOL>.json

records those of this code. Recordings of releases do not change.
"""

import importlib
import json
import pkgutil
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

import components.wire
from components.wire import codec
from components.wire.generate import FRAME_VERSION, StreamItem, TokenFrame
from components.wire.instances import InstanceRecord, dump_record
from components.wire.kv_events import BATCH_VERSION, KvEventBatch, pack_batch
from components.wire.refused import Refused

RECORDED: Final = Path(__file__).with_name("recorded")
TOKENS: Final = b"\x01\x00\x00\x00\x02\x00\x00\x00"  # int32[2]

for module in pkgutil.iter_modules(components.wire.__path__):
    importlib.import_module(f"components.wire.{module.name}")


def sample(kind: Any) -> Any:
    """Return a value of a type of `msgspec.inspect`, with every field set."""
    match kind:
        case inspect.StructType():
            return {field.encode_name: sample(field.type) for field in kind.fields}
        case inspect.UnionType():
            return sample(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.ListType():
            return [sample(kind.item_type)]
        case inspect.VarTupleType():
            return (sample(kind.item_type),)
        case inspect.TupleType():
            return tuple(sample(item) for item in kind.item_types)
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.LiteralType():
            return kind.values[0]
    plain: dict[Any, Any] = {
        inspect.IntType: 7,
        inspect.FloatType: 0.5,
        inspect.BoolType: True,
        inspect.StrType: "x",
        inspect.BytesType: TOKENS,
    }
    return plain[type(kind)]


def message_of(cls: type[Any]) -> Any:
    return msgspec.convert(sample(inspect.type_info(cls)), cls)


def schemas() -> dict[str, Any]:
    """Return the schemas of messages and etcd's records, by tag."""
    classes = {tag: cls for cls, tag in codec._tags.items()} | {"record": InstanceRecord}
    (*_, definitions) = msgspec.json.schema_components(classes.values())
    return {tag: _inlined(definitions[cls.__name__], definitions) for tag, cls in sorted(classes.items())}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Remove references and descriptions."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items() if key not in ("description", "title")}


def recording() -> dict[str, Any]:
    """Record the messages of this code."""
    frame = TokenFrame("i", "e", 9, 2)
    frame.add_tokens(3, 0, [1, 2])
    frame.add(StreamItem(4, 5, [], None, Refused(error="PeerLost", message="m"), 0, 0, None, None))
    packed = {tag: codec.pack(message_of(cls)) for cls, tag in sorted(codec._tags.items(), key=lambda one: one[1])}
    packed["record"] = dump_record(message_of(InstanceRecord))
    packed["frame"] = frame.pack()
    packed["kv-events"] = pack_batch(KvEventBatch("i", "e", 1, [bytes(16)], []))
    taken: dict[str, Any] = {
        "versions": {"frame": FRAME_VERSION, "kv-events": BATCH_VERSION},
        "schemas": schemas(),
        "bytes": {tag: b64encode(data).decode() for tag, data in packed.items()},
    }
    read: dict[str, Any] = json.loads(json.dumps(taken))  # without tuples, like a file
    return read


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(recording(), indent=1) + "\n")
