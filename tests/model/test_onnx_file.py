"""References to other files are found wherever an ONNX graph may hold a tensor, and damaged files are told as such."""

from collections.abc import Callable, Iterator

import onnx
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TrainingInfoProto,
)

from bert_tasks.model.onnx import external_tensor

# Message -> what holds it, and how one is put into it.
PARENTS: dict[type[Message], list[Callable[[Message], Message]]] = {
    TensorProto: [
        lambda tensor: GraphProto(initializer=[tensor]),
        lambda tensor: SparseTensorProto(values=tensor),
        lambda tensor: SparseTensorProto(indices=tensor),
        lambda tensor: AttributeProto(t=tensor),
        lambda tensor: AttributeProto(tensors=[TensorProto(name="before"), tensor]),
    ],
    SparseTensorProto: [
        lambda sparse: GraphProto(sparse_initializer=[sparse]),
        lambda sparse: AttributeProto(sparse_tensor=sparse),
        lambda sparse: AttributeProto(sparse_tensors=[sparse]),
    ],
    AttributeProto: [
        lambda attribute: NodeProto(op_type="Constant", attribute=[attribute]),
        lambda attribute: FunctionProto(name="f", attribute_proto=[attribute]),
    ],
    NodeProto: [
        lambda node: GraphProto(node=[NodeProto(op_type="Add"), node]),
        lambda node: FunctionProto(name="f", node=[node]),
    ],
    GraphProto: [
        lambda graph: ModelProto(ir_version=10, graph=graph, doc_string="after"),
        lambda graph: AttributeProto(g=graph),
        lambda graph: AttributeProto(graphs=[graph]),
        lambda graph: TrainingInfoProto(initialization=graph),
        lambda graph: TrainingInfoProto(algorithm=graph),
    ],
    FunctionProto: [lambda function: ModelProto(functions=[function])],
    TrainingInfoProto: [lambda training: ModelProto(training_info=[training])],
}


def placed(draw: st.DrawFn, message: Message) -> ModelProto:
    """The message in messages that may hold it, up to the model; the first ways of ``PARENTS`` are the shortest."""
    turns = 0
    while not isinstance(message, ModelProto):
        ways = PARENTS[type(message)]
        message = (draw(st.sampled_from(ways)) if turns < 12 else ways[0])(message)
        turns += 1
    return message


def messages_of_onnx() -> Iterator[tuple[str, str]]:
    """(message, message that it may hold) of those that lead from a model to a tensor."""
    for name in ("ModelProto", *(kind.__name__ for kind in PARENTS if kind is not TensorProto)):
        for field in getattr(onnx, name).DESCRIPTOR.fields:
            if field.message_type is not None and field.message_type.name in {kind.__name__ for kind in PARENTS}:
                yield name, field.message_type.name


def test_every_field_that_leads_to_a_tensor_is_drawn() -> None:
    """A version of ONNX with a new one fails here."""
    drawn = [(type(put(kind())).__name__, kind.__name__) for kind, ways in PARENTS.items() for put in ways]
    assert sorted(drawn) == sorted(messages_of_onnx())


@given(data=st.data(), marks=st.sampled_from(["location", "data", "both"]))
def test_external_data_are_found_anywhere(data: st.DataObject, marks: str) -> None:
    tensor = TensorProto(name="weights", dims=[2], data_type=TensorProto.FLOAT)
    if marks != "data":
        tensor.data_location = TensorProto.EXTERNAL
    if marks != "location":
        tensor.external_data.add(key="location", value="/etc/passwd")
    model = data.draw(st.composite(placed)(tensor))
    assert external_tensor(model.SerializeToString()) == "weights"


@given(data=st.data(), location=st.booleans())
def test_tensors_of_the_file_are_taken(data: st.DataObject, location: bool) -> None:
    tensor = TensorProto(name="weights", dims=[2], float_data=[1.0, 2.0], raw_data=b"j\x01p\x01")
    if location:
        tensor.data_location = TensorProto.DEFAULT
    assert external_tensor(data.draw(st.composite(placed)(tensor)).SerializeToString()) is None


@given(data=st.data())
def test_a_cut_file_is_never_taken_for_another(data: st.DataObject) -> None:
    """What is cut within a field is refused; what is cut between two is a smaller model."""
    tensor = TensorProto(name="weights", dims=[300], raw_data=bytes(1200))
    whole = data.draw(st.composite(placed)(tensor)).SerializeToString()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        ModelProto.FromString(cut)
    except Exception:
        with pytest.raises(ValueError, match=r"field|number"):
            external_tensor(cut)
    else:
        assert external_tensor(cut) is None


@given(content=st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        external_tensor(content)
    except ValueError:
        return
