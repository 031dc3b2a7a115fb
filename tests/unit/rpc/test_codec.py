"""What goes over the wire comes out as it went in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model_server.fakes import INFO, request
from tgi_cli.engine.messages import (
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    Started,
    StepOutputs,
    VerifiedDrafts,
)
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.interface import Adapter, Adapters
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.telemetry.context import TraceContext

uint32 = st.integers(0, 2**32 - 1)
int31 = st.integers(0, 2**31 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)

# One strategy per field, so that a field that is new and not carried is noticed.
SAMPLING = {
    "temperature": st.floats(0, 100),
    "top_k": uint32,
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0.01, 1),
    "repetition_penalty": st.floats(0.1, 10),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "seed": uint64,
    "top_logprobs": int31,
    "relative_frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.lists(st.tuples(int31, st.floats(-100, 100)), max_size=3).map(tuple),
    "bad_words": st.lists(st.lists(int31, min_size=1, max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
    "min_new_tokens": int31,
    "watermark": st.booleans(),
    "watermark_gamma": st.floats(0.1, 0.9),
    "watermark_delta": st.floats(-10, 10),
    "allowed_token_ids": st.lists(int31, max_size=3).map(tuple),
}
ids = st.lists(uint32, min_size=1, max_size=3).map(tuple)
REQUEST = {
    "request_id": uint64,
    "prompt_ids": st.lists(uint32).map(tuple),
    "prediction": st.lists(uint32).map(tuple),
    "sampling": st.builds(SamplingParams, **SAMPLING),
    "max_new_tokens": uint32,
    "stop_token_ids": st.frozensets(uint32),
    "ignore_eos": st.booleans(),
    "grammar": st.none() | st.text(),
    "first_id": st.none() | uint32,
    "thinking": st.none()
    | st.builds(
        ThinkingBudget,
        tokens=uint32,
        open=ids,
        close=ids,
        then=st.just(()) | ids,
        answer=st.just(()) | ids,
        inside=st.booleans(),
    ),
    "cache_salt": st.binary(max_size=40),
    "tenant": st.binary(max_size=40),
    "priority": st.integers(-(2**63), 2**63 - 1),
    "timeout_seconds": st.none() | st.floats(0, 1e9),
    "fork_of": st.none() | uint64,
    "prompt_logprobs": st.none() | uint32,
    "client_id": st.none() | st.integers(-(2**63), 2**63 - 1),
    "images": st.just(()),  # see test_image_codec.py
    "trace": st.none() | st.builds(TraceContext, st.text(min_size=1), st.text()),
}
ELSEWHERE = {"adapter_id"}
"""Sent as the adapter's name."""
IN_PROCESS = {"logits_processors", "return_context_logits", "return_generation_logits"}
requests = st.builds(GenerationRequest, **REQUEST)


@st.composite
def steps(draw: st.DrawFn) -> StepOutputs:
    outputs = StepOutputs(
        started=draw(st.lists(st.builds(Started, uint64, uint64, uint32), max_size=3)),
        drafts=draw(
            st.lists(st.builds(VerifiedDrafts, uint64, uint32, uint32, st.text()), max_size=3)
        ),
        finished=draw(
            st.lists(
                st.builds(Finished, uint64, st.sampled_from(FinishReason), st.text()), max_size=3
            )
        ),
    )
    for _ in range(draw(st.integers(0, 2))):
        tops = draw(st.lists(st.lists(st.tuples(uint32, float32), max_size=2), max_size=3))
        outputs.prompt_logprobs.append(
            PromptLogprobs(
                draw(uint64),
                draw(uint32),
                [draw(float32) for _ in tops],
                [[token_id for token_id, _ in top] for top in tops],
                [[logprob for _, logprob in top] for top in tops],
            )
        )
    for _ in range(draw(st.integers(0, 5))):
        top = draw(st.lists(st.tuples(uint32, float32), max_size=3))
        outputs.request_ids.append(draw(uint64))
        outputs.token_ids.append(draw(uint32))
        outputs.logprobs.append(draw(float32))
        outputs.top_ids.append([token_id for token_id, _ in top])
        outputs.top_logprobs.append([logprob for _, logprob in top])
    return outputs


def test_the_wire_has_every_field_of_a_request() -> None:
    sampling = {name for name, f in SamplingParams.__dataclass_fields__.items() if f.init}
    assert sampling == set(SAMPLING)
    assert set(GenerationRequest.__dataclass_fields__) == set(REQUEST) | IN_PROCESS | ELSEWHERE
    outputs = set(StepOutputs.__dataclass_fields__)
    sent = {field.name for field in pb.StepMessage.DESCRIPTOR.fields}
    assert outputs - sent == {"logits", "adapters"}


@pytest.mark.parametrize(
    "wish",
    [
        {"logits_processors": (lambda *_: None,)},
        {"return_context_logits": True},
        {"return_generation_logits": True},
    ],
)
def test_requests_that_need_the_engines_process_are_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="engine's process"):
        codec.encode_submit(request(1, **wish))


@given(requests)
def test_a_request_survives_the_wire(sent: GenerationRequest) -> None:
    data = codec.encode_submit(sent).SerializeToString()
    message = pb.ClientMessage.FromString(data)
    assert message.WhichOneof("kind") == "submit"
    assert codec.decode_submit(message.submit) == sent


@given(requests, st.text())
def test_an_adapters_name_survives_the_wire(sent: GenerationRequest, name: str) -> None:
    data = codec.encode_submit(sent, name).SerializeToString()
    assert pb.ClientMessage.FromString(data).submit.adapter == name


adapters = st.builds(
    Adapters, uint32, st.lists(st.builds(Adapter, st.text(), st.text()), max_size=3).map(tuple)
)


@given(adapters)
def test_the_adapters_survive_the_wire(sent: Adapters) -> None:
    data = codec.encode_info(INFO, sent).SerializeToString()
    message = pb.InfoResponse.FromString(data)
    assert codec.decode_adapters(message.adapters) == sent
    assert codec.decode_info(message) == INFO


@given(steps())
def test_a_step_survives_the_wire(outputs: StepOutputs) -> None:
    data = codec.encode_step(outputs).SerializeToString()
    assert codec.decode_step(pb.StepMessage.FromString(data)) == outputs


@given(steps(), steps())
def test_merged_steps_hold_both_in_order(first: StepOutputs, second: StepOutputs) -> None:
    tokens = first.token_ids + second.token_ids
    finished = first.finished + second.finished
    drafts = first.drafts + second.drafts
    codec.merge_steps(first, second)
    assert first.token_ids == tokens
    assert first.finished == finished
    assert first.drafts == drafts
    assert codec.decode_step(codec.encode_step(first)) == first


def test_info_and_cancel_survive_the_wire() -> None:
    staged = replace(INFO, pipeline_parallel_size=2, nodes=("stage 1 on node 0", "stage 0 on one"))
    for info in (INFO, staged):
        assert codec.decode_info(codec.encode_info(info)) == info
    message = codec.encode_cancel(2**64 - 1)
    assert message.WhichOneof("kind") == "cancel"
    assert message.cancel == 2**64 - 1
    # Id 0 is an id: a cancel of it must not look like an empty message.
    assert codec.encode_cancel(0).WhichOneof("kind") == "cancel"
