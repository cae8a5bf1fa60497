"""Protocol-buffer messages of the Tinker API, from a table of their fields.

Forward and backward requests, and the answers of these and of samples, travel as protocol buffers; all else is JSON.
"""

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CONTENT_TYPE = "application/x-protobuf"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Dtypes of a tensor."""

_PACKAGE = "tinker_public"
_MESSAGES: dict[str, tuple[str, ...]] = {
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "Tensor": ("1 bytes dense of encoding", "2 SparseCsr sparse_csr of encoding", "3 DType dtype", "4 int64* shape"),
    "BatchedTensor": ("1 bytes data", "2 bytes offsets", "3 DType dtype", "4 int64* trailing_shape"),
    "ArrayRecord": ("1 string type_tag", "2 map BatchedTensor fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type",
        "2 ArrayRecord* loss_fn_outputs",
        "3 map double metrics",
    ),
    "LossConfigValue": ("1 double number of value", "2 string text of value"),
    "EncodedTextChunk": ("1 bytes tokens",),
    "ImageChunk": ("1 bytes data", "2 string format"),
    "DmelChunk": ("1 bytes dmel",),
    "Chunk": (
        "1 EncodedTextChunk encoded_text of chunk",
        "2 ImageChunk image of chunk",
        "3 DmelChunk dmel of chunk",
    ),
    "ProvenanceSpan": (),
    "Datum": (
        "1 Chunk* model_input",
        "2 map Tensor loss_fn_inputs",
        "3 ProvenanceSpan* model_input_spans",
        "4 ProvenanceSpan* loss_fn_input_spans",
    ),
    "ForwardBackwardRequest": (
        "1 string model_id",
        "2 int32 seq_id",
        "3 Datum* data",
        "4 string loss_fn",
        "5 map double loss_fn_config",
        "6 bool forward_only",
        "7 map LossConfigValue loss_fn_config_v2",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "SampledSequence": (
        "1 StopReason stop_reason",
        "2 bytes tokens",
        "3 bytes logprobs",
        "4 TopkLogprobs topk_sampled_logprobs",
    ),
    "SampleResponse": (
        "1 SampledSequence* sequences",
        "2 bytes prompt_logprobs",
        "3 TopkLogprobs topk_prompt_logprobs",
        "4 int32 prompt_cache_hit_tokens",
        "5 Tensor target_prompt_logprobs",
    ),
}
"""Fields as ``NUMBER TYPE NAME``: ``*`` behind the type is a repeated one, ``map`` one from text, ``of`` its oneof."""
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
}


@cache
def message(name: str) -> Any:
    """Class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, table in _MESSAGES.items():
        own = file.message_type.add(name=name)
        for line in table:
            _add_field(own, line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(own: descriptor_pb2.DescriptorProto, line: str) -> None:
    number, kind, *rest = line.split()
    if kind == "map":
        kind, name = rest
        entry = own.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _set_type(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), "string")
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
        added = own.field.add(name=name, number=int(number), label=_Field.LABEL_REPEATED, type=_Field.TYPE_MESSAGE)
        added.type_name = f".{_PACKAGE}.{own.name}.{entry.name}"
        return
    name, *oneof = rest
    label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
    added = own.field.add(name=name, number=int(number), label=label)
    _set_type(added, kind.removesuffix("*"))
    if oneof:
        if not own.oneof_decl:
            own.oneof_decl.add(name=oneof[-1])
        added.oneof_index = 0


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"
