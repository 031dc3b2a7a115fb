"""TGI's own services over the wire, called through reflection."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.tools.grpc_reflection import ReflectionClient
from tests.unit.engine.fake_grammar import FakeCompiler, slots
from tests.unit.engine.fake_speculator import FakeSpeculator
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.model_server.fakes import request as submitted
from tests.unit.tgi_grpc.fakes import (
    BOS,
    EOS,
    V2,
    V3,
    VOCAB,
    Heard,
    a_request,
    answer,
    served,
)
from tgi_cli.engine import reserved_sequences
from tgi_cli.engine.step import ChunkLogprobs
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.tgi_grpc.step_client import MAX_CALLERS

VERSIONS = pytest.mark.parametrize("service", [V2, V3])
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
Code = grpc.StatusCode


def status(call: Callable[..., Any], *args: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **fields)
    return caught.value.code(), caught.value.details()


def prefill(client: ReflectionClient, batch_id: int, *requests: Any, **more: Any) -> Any:
    batch = client.message("Batch", id=batch_id, requests=requests, size=len(requests))
    return client.Prefill(batch=batch, **more)


# --------------------------------------------------------------------------- the wire

COMMON = """
HealthRequest:
HealthResponse:
InfoRequest:
ServiceDiscoveryRequest:
ServiceDiscoveryResponse: urls=1 repeated string
ClearCacheRequest: id=1 optional uint64
ClearCacheResponse:
NextTokenChooserParameters: temperature=1 float; top_k=2 uint32; top_p=3 float; typical_p=4 float;\
 do_sample=5 bool; seed=6 uint64; repetition_penalty=7 float; watermark=8 bool;\
 frequency_penalty=9 float; grammar=10 string; grammar_type=11 enum
StoppingCriteriaParameters: max_new_tokens=1 uint32; stop_sequences=2 repeated string;\
 ignore_eos_token=3 bool
GeneratedText: text=1 string; generated_tokens=2 uint32; finish_reason=3 enum;\
 seed=4 optional uint64
Tokens: ids=1 repeated uint32; logprobs=2 repeated float; texts=3 repeated string;\
 is_special=4 repeated bool
Generation: request_id=1 uint64; prefill_tokens=2 message; tokens=3 message;\
 generated_text=4 optional message; top_tokens=5 repeated message
FilterBatchRequest: batch_id=1 uint64; request_ids=2 repeated uint64
FilterBatchResponse: batch=1 message
DecodeRequest: batches=1 repeated message
DecodeResponse: generations=1 repeated message; batch=2 optional message; forward_ns=3 uint64;\
 decode_ns=4 uint64; total_ns=5 uint64; concat_ns=6 optional uint64
"""
ONLY_V2 = """
InfoResponse: requires_padding=1 bool; dtype=2 string; device_type=3 string;\
 window_size=4 optional uint32; speculate=5 uint32
Request: id=1 uint64; inputs=2 string; truncate=3 uint32; parameters=4 message;\
 stopping_parameters=5 message; prefill_logprobs=6 bool; top_n_tokens=7 uint32
Batch: id=1 uint64; requests=2 repeated message; size=3 uint32; max_tokens=4 uint32
CachedBatch: id=1 uint64; request_ids=2 repeated uint64; size=3 uint32; max_tokens=4 uint32
PrefillRequest: batch=1 message
PrefillResponse: generations=1 repeated message; batch=2 optional message; forward_ns=3 uint64;\
 decode_ns=4 uint64; total_ns=5 uint64
WarmupRequest: batch=1 message; max_input_length=2 uint32; max_prefill_tokens=3 uint32;\
 max_total_tokens=4 uint32
WarmupResponse: max_supported_total_tokens=1 optional uint32
"""
ONLY_V3 = """
InfoResponse: requires_padding=1 bool; dtype=2 string; device_type=3 string;\
 window_size=4 optional uint32; speculate=5 uint32; support_chunking=6 bool;\
 use_prefix_caching=7 bool; attention_impl=8 string; block_size=9 uint32
Image: data=1 bytes; mimetype=2 string
InputChunk: text=1 string; image=2 message
Input: chunks=1 repeated message
Request: id=1 uint64; inputs=2 string; truncate=3 uint32; parameters=4 message;\
 stopping_parameters=5 message; prefill_logprobs=6 bool; top_n_tokens=7 uint32;\
 input_chunks=8 message; blocks=9 repeated uint32; slots=10 repeated uint32;\
 adapter_id=11 optional string; cache_len=12 uint32; add_special_tokens=13 bool;\
 chunk_len=14 optional uint32
Batch: id=1 uint64; requests=2 repeated message; size=3 uint32; max_tokens=4 uint32;\
 max_blocks=5 uint32
CachedBatch: id=1 uint64; request_ids=2 repeated uint64; size=3 uint32; max_tokens=4 uint32;\
 current_tokens=5 uint32
PrefillRequest: batch=1 message; cached_batch=2 message
PrefillResponse: generations=1 repeated message; batch=2 optional message; forward_ns=3 uint64;\
 decode_ns=4 uint64; total_ns=5 uint64; concat_ns=6 optional uint64
WarmupRequest: batch=1 message; max_input_tokens=2 optional uint32; max_prefill_tokens=3 uint32;\
 max_total_tokens=4 optional uint32
WarmupResponse: max_supported_total_tokens=1 optional uint32; max_input_tokens=2 uint32;\
 max_total_tokens=3 uint32
"""
_KINDS = {2: "float", 4: "uint64", 8: "bool", 9: "string", 11: "message", 12: "bytes"}
_KINDS |= {13: "uint32", 14: "enum"}


def _field(field: Any) -> str:
    optional = field.containing_oneof is not None and field.containing_oneof.name[0] == "_"
    words = ["repeated"] * field.is_repeated + ["optional"] * optional
    return " ".join([f"{field.name}={field.number}", *words, _KINDS[field.type]])


@pytest.mark.parametrize(("service", "more"), [(V2, ONLY_V2), (V3, ONLY_V3)])
def test_names_and_numbers_are_tgis(service: str, more: str) -> None:
    expected = dict(
        line.split(":", 1) for line in (COMMON + more).strip().splitlines() if line.strip()
    )
    with served() as server, server.client(service) as client:
        assert {V2, V3, "tgi.engine.v1.Engine"} <= set(client.services)
        described = client.descriptor
        methods = {m.name: (m.input_type.name, m.output_type.name) for m in described.methods}
        names = [
            "Info",
            "ServiceDiscovery",
            "ClearCache",
            "FilterBatch",
            "Warmup",
            "Prefill",
            "Decode",
            "Health",
        ]
        assert methods == {name: (f"{name}Request", f"{name}Response") for name in names}
        messages = described.file.message_types_by_name
        found = {
            name: "; ".join(_field(field) for field in message.fields)
            for name, message in messages.items()
        }
        assert found == {name: fields.strip() for name, fields in expected.items()}
        enums = {
            name: dict(zip(enum.values_by_name, range(9), strict=False))
            for name, enum in described.file.enum_types_by_name.items()
        }
        grammars = ("GRAMMAR_TYPE_NONE", "GRAMMAR_TYPE_JSON", "GRAMMAR_TYPE_REGEX")
        ends = ("FINISH_REASON_LENGTH", "FINISH_REASON_EOS_TOKEN", "FINISH_REASON_STOP_SEQUENCE")
        assert enums == {
            "GrammarType": {name: number for number, name in enumerate(grammars)},
            "FinishReason": {name: number for number, name in enumerate(ends)},
        }


# --------------------------------------------------------------------------- the call flow


@DEPTHS
@VERSIONS
def test_clients_that_leave_or_never_read_do_not_disturb_others(service: str, depth: int) -> None:
    """The call flow of TGI's architecture document."""
    one, two, three = [5, 6, 7], [8, 9], [3] * 20
    with served(depth) as server, server.client(service) as client:
        heard = Heard()
        assert client.ServiceDiscovery().urls == [f"unix://{server.path}"]
        client.Info()
        client.Health()
        client.ClearCache()
        warmed = client.Warmup(max_prefill_tokens=64)
        assert warmed.max_supported_total_tokens == 512

        batch1 = heard(prefill(client, 1, a_request(client, 1, one, 50))).batch
        for _ in range(2):
            batch1 = heard(client.Decode(batches=[batch1])).batch
        batch2 = heard(prefill(client, 2, a_request(client, 2, two, 8))).batch
        response = heard(client.Decode(batches=[batch1, batch2]))
        assert response.HasField("concat_ns")
        assert (response.batch.id, list(response.batch.request_ids)) == (1, [1, 2])
        assert response.batch.max_tokens == 56 + 12, "in whole blocks of four"
        # Client 1 leaves.
        left = client.FilterBatch(batch_id=1, request_ids=[2]).batch
        assert (left.id, list(left.request_ids), left.max_tokens) == (1, [2], 12)
        response = heard(client.Decode(batches=[left]))
        assert not response.HasField("concat_ns")
        # Client 3 leaves without having received anything.
        heard(prefill(client, 3, a_request(client, 3, three, 5)))
        client.ClearCache(id=3)
        assert status(client.Decode, batches=[{"id": 3}])[0] is Code.NOT_FOUND
        heard.run_out(client, response.batch)
        assert status(client.Decode, batches=[{"id": 1}])[0] is Code.NOT_FOUND, "it has ended"
        assert server.used_blocks == 0
    assert heard.ids[1] == answer(one, 4)
    assert heard.ids[2] == answer(two, 8)
    assert heard.ids[3] == answer(three, 1)
    end = heard.ends[2]
    assert (end.generated_tokens, end.finish_reason, end.HasField("seed")) == (8, 0, False)
    assert end.text == "".join(f"<{i}>" for i in answer(two, 8) if i not in (BOS, EOS))


def test_a_prompt_joins_a_running_batch_chunk_by_chunk() -> None:
    prompt = [i + 10 for i in range(100)]  # and one more in front
    with served(max_batch_prefill_tokens=32) as server, server.client() as client:
        heard = Heard()
        client.Warmup(max_prefill_tokens=24)
        batch = heard(prefill(client, 1, a_request(client, 1, [5], 30))).batch
        assert batch.current_tokens == 1
        late = a_request(client, 2, prompt, 3, cache_len=3, chunk_len=20)
        response = heard(prefill(client, 2, late, cached_batch=batch))
        assert response.HasField("concat_ns")
        assert (response.batch.id, list(response.batch.request_ids)) == (1, [1, 2])
        assert [g.request_id for g in response.generations] == [1]
        assert response.batch.current_tokens == 24, "one, and what the limit leaves of the rest"
        sizes = []
        while 2 not in heard.ids:
            response = heard(client.Decode(batches=[response.batch]))
            sizes.append(response.batch.current_tokens)
        assert sizes == [24, 24, 10, 2]
        assert [step.num_tokens for step in server.worker.steps[1:6]] == [24, 24, 24, 24, 10]
        heard.run_out(client, response.batch)
    assert heard.ids == {1: answer([5], 30), 2: answer(prompt, 3)}


def test_a_long_prefill_takes_several_steps() -> None:
    prompts = [[i + 10] * 50 for i in range(3)]
    with served(max_batch_prefill_tokens=32) as server, server.client() as client:
        heard = Heard()
        requests = [a_request(client, i, prompt, 4) for i, prompt in enumerate(prompts)]
        batch = heard(prefill(client, 0, *requests)).batch
        assert max(step.num_tokens for step in server.worker.steps) <= 32
        heard.run_out(client, batch)
    assert heard.ids == {i: answer(prompt, 4) for i, prompt in enumerate(prompts)}


# --------------------------------------------------------------------------- requests


@VERSIONS
def test_a_generation_has_all_fields(service: str) -> None:
    worker = FakeWorker(4, VOCAB)
    worker.logprob = -0.25
    with served(worker=worker) as server, server.client(service) as client:
        values = {"do_sample": True, "seed": 9}
        parameters = client.message("NextTokenChooserParameters", **values)
        response = prefill(client, 0, a_request(client, 4, [5, 6], 1, parameters=parameters))
        (generation,) = response.generations
        (token_id,) = answer([5, 6], 1)
        assert list(generation.tokens.ids) == [token_id]
        assert list(generation.tokens.texts) == [f"<{token_id}>"]
        assert list(generation.tokens.logprobs) == [-0.25]
        assert list(generation.tokens.is_special) == [token_id in (BOS, EOS)]
        assert not generation.HasField("prefill_tokens")
        assert generation.generated_text.seed == 9
        assert not response.HasField("batch")
        sampling = worker.steps[-1].new[0].sampling
        assert (sampling.seed, sampling.temperature, sampling.top_p) == (9, 1.0, 1.0)


def test_parameters_reach_the_sampler() -> None:
    with served() as server, server.client() as client:

        def sampling_of(**values: Any) -> Any:
            parameters = client.message("NextTokenChooserParameters", **values)
            request = a_request(client, 1, [5], 1, parameters=parameters, top_n_tokens=3)
            prefill(client, 0, request)
            return server.worker.steps[-1].new[0].sampling

        assert sampling_of().greedy
        neutral = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
        assert sampling_of(**neutral).greedy
        for warp in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}):
            assert not sampling_of(**(neutral | warp)).greedy
        found = sampling_of(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            typical_p=0.75,
            repetition_penalty=1.5,
            frequency_penalty=0.125,
            watermark=True,
            seed=(1 << 64) - 1,
        )
        assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 0.25)
        assert (found.typical_p, found.repetition_penalty) == (0.75, 1.5)
        assert (found.relative_frequency_penalty, found.frequency_penalty) == (0.125, 0.0)
        assert (found.watermark, found.seed, found.top_logprobs) == (True, (1 << 64) - 1, 3)
        assert (found.watermark_gamma, found.watermark_delta) == (0.5, 2.0)


def test_prompts_come_from_inputs_or_chunks() -> None:
    with served() as server, server.client() as client:

        def tokens_of(**fields: Any) -> list[int]:
            request = client.message(
                "Request", id=1, stopping_parameters={"max_new_tokens": 1}, **fields
            )
            prefill(client, 0, request)
            return server.worker.steps[-1].new[0].token_ids

        chunks = {"chunks": [{"text": "7 8"}, {"text": " 9"}]}
        assert tokens_of(inputs="5 6") == [5, 6]
        assert tokens_of(inputs="5 6", add_special_tokens=True) == [BOS, 5, 6]
        assert tokens_of(inputs="5 6", input_chunks=chunks) == [7, 8, 9]
        assert tokens_of(input_chunks=chunks, truncate=2) == [8, 9]
        # The caller's plan of blocks is its own affair.
        assert tokens_of(inputs="5 6", blocks=[0], slots=range(16), cache_len=1) == [5, 6]


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_end_with_their_finish_reason(depth: int) -> None:
    prompt = [40, 41]
    words = answer(prompt, 12)
    with served(depth) as server, server.client() as client:

        def end_of(**stopping: Any) -> tuple[int, int, int]:
            heard = Heard()
            request = a_request(client, 1, prompt, 12, stopping=stopping)
            response = heard(prefill(client, 0, request))
            heard.run_out(client, response.batch)
            assert heard.ids[1] == words[: len(heard.ids[1])]
            end = heard.ends[1]
            assert end.text.endswith(f"<{words[end.generated_tokens - 1]}>")
            free_at = time.monotonic() + 60
            while server.used_blocks:
                assert time.monotonic() < free_at, "what has ended is still held"
                time.sleep(0.005)
            return len(heard.ids[1]), end.generated_tokens, end.finish_reason

        assert end_of() == (12, 12, 0)
        stop = f"{words[4]}>"
        assert end_of(stop_sequences=["no such", stop]) == (5, 5, 2)
        assert end_of(stop_sequences=[f"><{words[3]}"]) == (4, 4, 2), "within a token"
        assert end_of(stop_sequences=[stop], max_new_tokens=5) == (5, 5, 0), "the length first"


def test_end_tokens_end_unless_ignored() -> None:
    start = next(i for i in range(3, VOCAB) if EOS in answer([i], 40)[:-1])
    words = answer([start], 40)
    place = words.index(EOS) + 1
    with served() as server, server.client() as client:
        cases = ((True, 40, 40, 0), (False, 40, place, 1), (False, place, place, 0))
        for ignored, new, count, reason in cases:
            heard = Heard()
            stopping = {"ignore_eos_token": ignored}
            response = prefill(client, 0, a_request(client, 1, [start], new, stopping=stopping))
            heard(response)
            heard.run_out(client, response.batch)
            end = heard.ends[1]
            assert (end.generated_tokens, end.finish_reason) == (count, reason)
            assert end.text == "".join(f"<{i}>" for i in words[:count] if i not in (BOS, EOS))


def test_prompt_logprobs_and_top_tokens_are_returned() -> None:
    class Scoring(FakeWorker):
        def sample(self, handle: object, masks: Any = None) -> Any:
            pending = super().sample(handle, masks)
            step, result = self.steps[-1], pending.result
            result.top_ids = [[7, EOS]] * len(result.token_ids)
            result.top_logprobs = [[-1.0, -2.0]] * len(result.token_ids)
            for place, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
                wanted = [new for new in step.new if new.extras.prompt_logprobs is not None]
                if wanted or start:
                    scored = min(count, 10 - start)
                    values = [-float(start + i + 1) for i in range(scored)]
                    empty: list[list[Any]] = [[] for _ in values]
                    result.prompt_logprobs[place] = ChunkLogprobs(start + 1, values, empty, empty)
            return pending

    worker = Scoring(4, VOCAB)
    with served(worker=worker, max_batch_prefill_tokens=4) as server, server.client() as client:
        prompt = list(range(20, 30))
        request = a_request(client, 1, prompt, 2, prefill_logprobs=True, top_n_tokens=2)
        first = prefill(client, 0, request)
        (generation,) = first.generations
        tokens = generation.prefill_tokens
        assert list(tokens.ids) == [BOS, *prompt]
        assert tokens.texts[:2] == ["<1>", "<20>"]
        assert list(tokens.is_special) == [True] + [False] * 10
        assert math.isnan(tokens.logprobs[0])
        assert list(tokens.logprobs[1:]) == [-float(i) for i in range(1, 11)]
        (top,) = generation.top_tokens
        assert (list(top.ids), list(top.logprobs)) == ([7, EOS], [-1.0, -2.0])
        assert (list(top.texts), list(top.is_special)) == (["<7>", "<2>"], [False, True])
        (generation,) = client.Decode(batches=[first.batch]).generations
        assert not generation.HasField("prefill_tokens")
        assert len(generation.top_tokens) == 1


def test_grammars_and_adapters_reach_the_engine(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    worker = FakeWorker(4, VOCAB)
    with (
        served(worker=worker, grammars=FakeCompiler(), max_loras=1, max_cpu_loras=2) as server,
        server.client() as client,
    ):
        parameters = {"grammar": slots([11, 12], [13], [14, 15]), "grammar_type": 2}
        heard = Heard()
        response = heard(prefill(client, 0, a_request(client, 1, [5], 9, parameters=parameters)))
        heard.run_out(client, response.batch)
        assert heard.ids[1][0] in (11, 12)
        assert heard.ids[1][1] == 13
        assert heard.ends[1].finish_reason == 1
        bad = a_request(client, 1, [5], 9, parameters=parameters | {"grammar_type": 1})
        code, cause = status(prefill, client, 0, bad)
        assert (code, "request 1: its grammar is not valid: it is no regular" in cause) == (
            Code.INVALID_ARGUMENT,
            True,
        )

        server.server.adapters.load("mine", lambda: tmp_path)
        heard = Heard()
        response = heard(prefill(client, 0, a_request(client, 2, [5, 6], 9, adapter_id="mine")))
        heard.run_out(client, response.batch)
        assert heard.ids[2] == answer([5, 6], 9, adapter_id=1)
        other = a_request(client, 3, [5, 6], 9, adapter_id="yours")
        code, cause = status(prefill, client, 0, other)
        assert code is Code.INVALID_ARGUMENT
        assert cause == "request 3: there is no adapter 'yours'; there are: mine"


# --------------------------------------------------------------------------- what goes wrong


@VERSIONS
def test_errors_name_their_request_and_change_nothing(service: str) -> None:
    with served() as server, server.client(service) as client:
        heard = Heard()
        batch = heard(prefill(client, 1, a_request(client, 1, [5], 6))).batch
        before = server.used_blocks

        def refused(**fields: Any) -> tuple[grpc.StatusCode, str]:
            good = a_request(client, 10, [5], 5)
            parameters = fields.pop("parameters", {})
            bad = a_request(client, 11, fields.pop("prompt", [5]), fields.pop("new", 5))
            bad.parameters.CopyFrom(client.message("NextTokenChooserParameters", **parameters))
            bad.stopping_parameters.stop_sequences.extend(fields.pop("stops", ()))
            for name, value in fields.items():
                setattr(bad, name, value)
            return status(prefill, client, 2, good, bad)

        invalid = Code.INVALID_ARGUMENT
        assert refused(prompt=[3] * 255, new=1) == (
            invalid,
            "request 11: 256 prompt tokens and 1 new tokens are more than max_total_tokens (256)",
        )
        assert refused(prompt=[3] * 200, new=60) == (
            invalid,
            "request 11: 201 prompt tokens and 60 new tokens are more than max_total_tokens (256)",
        )
        assert refused(new=0) == (invalid, "request 11: max_new_tokens must be at least 1")
        assert refused(parameters={"top_p": 1.5})[1] == (
            "request 11: `top_p` must be > 0.0 and <= 1.0"
        )
        assert "`temperature`" in refused(parameters={"temperature": float("nan")})[1]
        assert "request 11: `temperature`" in refused(parameters={"temperature": -1.0})[1]
        assert "`repetition_penalty`" in refused(parameters={"repetition_penalty": -2.0})[1]
        assert "no grammar type 9" in refused(parameters={"grammar_type": 9})[1]
        assert "grammars are not" in refused(parameters={"grammar_type": 2, "grammar": "a"})[1]
        assert refused(stops=["a", "b" * 1025]) == (
            invalid,
            "request 11: a `stop` sequence may have up to 1024 characters. Given: 1025",
        )
        assert refused(top_n_tokens=1001)[0] is invalid
        assert refused(id=10) == (invalid, "request 10 is in the batch already")
        if service == V3:
            image = client.message("InputChunk", image={"data": b"", "mimetype": "image/png"})
            pictured = a_request(client, 12, [5], 5)
            pictured.input_chunks.chunks.append(image)
            code, cause = status(prefill, client, 2, pictured)
            assert (code, cause) == (
                invalid,
                "request 12: it has an image, and the model takes text only",
            )
            empty = client.message("Request", id=13, stopping_parameters={"max_new_tokens": 1})
            assert status(prefill, client, 2, empty)[1] == "request 13: the prompt has no tokens"
            assert status(prefill, client, 2, empty, cached_batch={"id": 9})[0] is Code.NOT_FOUND
        again = a_request(client, 20, [5], 5)
        assert status(prefill, client, 1, again)[0] is Code.ALREADY_EXISTS
        assert status(prefill, client, 2) == (invalid, "batch 2 has no requests")
        assert status(client.Decode)[0] is invalid
        assert status(client.Decode, batches=[batch, batch])[0] is invalid
        code, cause = status(client.Decode, batches=[batch, {"id": 77}])
        assert code is Code.NOT_FOUND
        assert cause.startswith("batch 77 does not exist")
        assert status(client.FilterBatch, batch_id=78, request_ids=[1])[0] is Code.NOT_FOUND
        assert status(client.FilterBatch, batch_id=1)[0] is invalid
        assert status(client.FilterBatch, batch_id=1, request_ids=[1, 5]) == (
            invalid,
            "request 5 is not in batch 1",
        )
        client.ClearCache(id=79)
        assert server.used_blocks == before
        heard.run_out(client, batch)
    assert heard.ids[1] == answer([5], 6)


@VERSIONS
def test_warmup_sets_the_limits(service: str) -> None:
    name = "max_input_tokens" if service == V3 else "max_input_length"
    with served() as server, server.client(service) as client:
        response = client.Warmup()
        if service == V3:
            assert (response.max_input_tokens, response.max_total_tokens) == (255, 256)
        batch = client.message("Batch", id=0, size=1)
        batch.requests.append(a_request(client, 0, [5], 1))
        response = client.Warmup(
            batch=batch, max_total_tokens=50, max_prefill_tokens=4096, **{name: 40}
        )
        if service == V3:
            assert (response.max_input_tokens, response.max_total_tokens) == (40, 50)
        assert response.max_supported_total_tokens == 512
        assert (
            "longer than max_input_tokens (40)"
            in status(prefill, client, 1, a_request(client, 1, [3] * 40, 1))[1]
        )
        assert (
            "more than max_total_tokens (50)"
            in status(prefill, client, 1, a_request(client, 1, [3] * 30, 20))[1]
        )
        code, cause = status(client.Warmup, max_total_tokens=257)
        assert code is Code.INVALID_ARGUMENT
        assert cause.startswith("max_total_tokens 257 is more than 256")
        assert "max_input_tokens 50" in status(client.Warmup, max_total_tokens=50, **{name: 50})[1]


def test_info_describes_the_server() -> None:
    with served() as server, server.client() as client, server.client(V2) as older:
        info = client.Info()
        assert (info.dtype, info.device_type, info.requires_padding) == (
            "torch.float32",
            "cpu",
            False,
        )
        assert (info.support_chunking, info.block_size, info.speculate) == (True, 4, 0)
        assert not info.use_prefix_caching, "callers need not account for the cache"
        assert info.attention_impl == "paged"
        assert not info.HasField("window_size")
        assert (older.Info().dtype, older.Info().device_type) == ("torch.float32", "cpu")


@VERSIONS
@DEPTHS
def test_a_step_with_drafts_gives_one_generation_of_several_tokens(
    service: str, depth: int
) -> None:
    prompts = {1: [5, 6], 2: [7], 3: [8, 9, 10]}
    # By the order in which the engine numbers requests.
    expected = [answer(prompt, 30) for prompt in prompts.values()]
    speculator = FakeSpeculator("perfect", lambda number: expected[number - (1 << 63)], 0, VOCAB)
    with served(depth, speculator=speculator) as server, server.client(service) as client:
        assert client.Info().speculate == 7
        heard, count = Heard(drafts=40), 0
        requests = [a_request(client, i, prompt, 30) for i, prompt in prompts.items()]
        batch = heard(prefill(client, 1, *requests)).batch
        while batch.size:
            response = client.Decode(batches=[batch])
            named = [generation.request_id for generation in response.generations]
            assert len(set(named)) == len(named) == batch.size, "one each"
            batch, count = heard(response).batch, count + 1
        assert heard.ids == dict(zip(prompts, expected, strict=True))
        assert {end.generated_tokens for end in heard.ends.values()} == {30}
        assert count < 29


@VERSIONS
def test_what_follows_a_stop_sequence_within_a_step_is_dropped(service: str) -> None:
    expected = answer([5, 6], 30)
    speculator = FakeSpeculator("perfect", lambda _: expected, 3, VOCAB)
    stop = f"<{expected[4]}><{expected[5]}>"
    with served(speculator=speculator) as server, server.client(service) as client:
        heard = Heard(drafts=40)
        stopping = {"stop_sequences": [stop], "max_new_tokens": 30, "ignore_eos_token": True}
        asked = a_request(client, 1, [5, 6], 30, stopping=stopping)
        heard.run_out(client, heard(prefill(client, 1, asked)).batch)
        assert heard.ids[1] == expected[:6]
        end = heard.ends[1]
        assert end.generated_tokens == 6
        assert end.finish_reason == 2, "FINISH_REASON_STOP_SEQUENCE"
        assert end.text.endswith(stop)


def test_each_token_of_a_step_has_its_top_tokens() -> None:
    class Scoring(FakeWorker):
        def sample(self, handle: object, masks: Any = None) -> Any:
            pending = super().sample(handle, masks)
            result = pending.result
            result.top_ids = [[token_id, 7] for token_id in result.token_ids]
            result.top_logprobs = [[-1.0, -2.0]] * len(result.token_ids)
            return pending

    expected = answer([5], 12)
    speculator = FakeSpeculator("perfect", lambda _: expected, 1, VOCAB)
    worker = Scoring(4, VOCAB)
    with served(worker=worker, speculator=speculator) as server, server.client() as client:
        batch = prefill(client, 1, a_request(client, 1, [5], 12, top_n_tokens=2)).batch
        most = 0
        while batch.size:
            response = client.Decode(batches=[batch])
            (generation,) = response.generations
            ids = list(generation.tokens.ids)
            assert [list(top.ids) for top in generation.top_tokens] == [[i, 7] for i in ids]
            most, batch = max(most, len(ids)), response.batch
        assert most > 1


def test_a_failed_step_ends_its_batch_and_names_its_requests() -> None:
    worker = FakeWorker(4, VOCAB)
    with served(worker=worker) as server, server.client() as client:
        heard = Heard()
        one = heard(prefill(client, 1, a_request(client, 1, [5], 9))).batch
        two = heard(prefill(client, 2, a_request(client, 2, [6], 9))).batch
        three = heard(prefill(client, 3, a_request(client, 3, [7], 9))).batch
        worker.fail_when = lambda _step: RuntimeError("the device failed")
        code, cause = status(client.Decode, batches=[one, two])
        assert (code, cause) == (Code.INTERNAL, "requests 1, 2: RuntimeError: the device failed")
        worker.fail_when = lambda _step: None
        for gone in (one, two):
            assert status(client.Decode, batches=[gone])[0] is Code.NOT_FOUND
        client.ClearCache(id=1)
        # One row alone fails: the wire has no word for it but a status.
        worker.poison = {worker.steps[2].new[0].request_id}
        joined = prefill(client, 4, a_request(client, 4, [8], 9)).batch
        code, cause = status(client.Decode, batches=[joined, three])
        assert (code, cause) == (Code.INTERNAL, "request 3: its logits are not numbers")
        assert status(client.Decode, batches=[joined])[0] is Code.NOT_FOUND
        heard(prefill(client, 5, a_request(client, 5, [9], 1)))
        assert server.used_blocks == 0


def test_a_lack_of_blocks_is_a_status_and_the_batch_stays() -> None:
    with served(num_blocks=20) as server, server.client() as client:
        heard = Heard()
        batch = heard(prefill(client, 1, a_request(client, 1, [5], 40))).batch
        more = a_request(client, 2, [6] * 20, 30)
        code, cause = status(prefill, client, 2, more, cached_batch=batch)
        assert code is Code.RESOURCE_EXHAUSTED
        assert cause.startswith("request 2: it needs 50 tokens of the KV cache, and of its 80")
        client.ClearCache(id=2)
        heard.run_out(client, batch)
    assert heard.ids[1] == answer([5], 40)


def test_a_lost_client_does_not_hold_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserved_sequences, "IDLE_SECONDS", 0.1)
    with served(num_blocks=20) as server:
        with server.client() as gone:
            prefill(gone, 1, a_request(gone, 1, [5], 60))
        time.sleep(0.15)
        with server.client() as client:
            heard = Heard()
            response = heard(prefill(client, 2, a_request(client, 2, [6], 60)))
            heard.run_out(client, response.batch)
            back = Heard()
            back.run_out(client, client.message("CachedBatch", id=1, size=1))
    assert heard.ids[2] == answer([6], 60)
    assert back.ids[1] == answer([5], 60)[1:]


def test_versions_do_not_see_each_others_batches() -> None:
    with served() as server, server.client(V2) as old, server.client(V3) as new:
        heard, other = Heard(), Heard()
        batch = heard(prefill(old, 1, a_request(old, 1, [5], 9))).batch
        same = other(prefill(new, 1, a_request(new, 1, [6], 9))).batch
        heard.run_out(old, batch)
        new.ClearCache()
        assert status(new.Decode, batches=[same])[0] is Code.NOT_FOUND
    assert heard.ids[1] == answer([5], 9)


def test_the_number_of_waiting_callers_is_bounded() -> None:
    worker = FakeWorker(4, VOCAB)
    hold = threading.Event()
    with served(worker=worker) as server, server.client() as client:
        batch = prefill(client, 0, a_request(client, 0, [5], 9)).batch

        def held(_step: object) -> None:
            hold.wait(60)

        worker.fail_when = held
        calls = [
            threading.Thread(
                target=prefill, args=(client, i, a_request(client, i, [i], 1)), daemon=True
            )
            for i in range(1, MAX_CALLERS + 1)
        ]
        for call in calls:
            call.start()
        end = time.monotonic() + 60
        while server.front._client._callers._value:
            assert time.monotonic() < end
            time.sleep(0.01)
        code, cause = status(client.ClearCache)
        assert (code, cause) == (
            Code.RESOURCE_EXHAUSTED,
            f"{MAX_CALLERS} calls are waiting already",
        )
        client.Health()  # is answered all the same
        hold.set()
        for call in calls:
            call.join(timeout=60)
        Heard().run_out(client, batch)


def test_calls_after_the_end_of_the_engine_are_unavailable() -> None:
    with served() as server, server.client() as client:
        batch = prefill(client, 0, a_request(client, 0, [5], 9)).batch
        server.server.drain()
        code, cause = status(prefill, client, 1, a_request(client, 1, [5], 9))
        assert (code, cause) == (Code.UNAVAILABLE, "the model server is shutting down")
        heard = Heard()
        response = heard(client.Decode(batches=[batch]))  # what is here may be driven to its end
        server.front.end("the engine broke")
        assert status(client.Health) == (Code.UNAVAILABLE, "the engine broke")
        assert server.text.closed
        heard.run_out(client, response.batch)


@DEPTHS
def test_both_versions_serve_concurrently(depth: int) -> None:
    """Sessions and steps over a pool that cannot hold all of them."""
    prompts = [tuple([7] * (i % 5 * 4) + [i + 20]) for i in range(24)]

    async def sessions(path: str) -> list[list[int]]:
        client = await GrpcEngineClient.connect(path, timeout=60)
        try:

            async def one(i: int) -> list[int]:
                ids: list[int] = []
                stream = client.submit(submitted(i, prompt_ids=prompts[i], max_new_tokens=20 + i))
                async for batch in stream:
                    ids += batch.token_ids
                    if batch.finished is not None:
                        assert not batch.finished.error
                return ids

            async with asyncio.timeout(60):
                return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))
        finally:
            await client.close()

    with served(depth, num_blocks=40, max_batch_size=6) as server:
        found: list[list[list[int]]] = []
        other = threading.Thread(
            target=lambda: found.append(asyncio.run(sessions(f"unix:{server.path}")))
        )
        other.start()
        heard = Heard()
        with server.client() as client:
            number = 0
            while other.is_alive() or number < 10:
                number += 1
                asked = [100 * number + i for i in range(2)]
                requests = [a_request(client, i, [i % 900 + 3, 7], 12) for i in asked]
                response = heard(prefill(client, number, *requests))
                heard.run_out(client, response.batch)
        other.join(timeout=60)
        assert server.used_blocks == 0
    assert found[0] == [continuation(prompt, 20 + i, VOCAB) for i, prompt in enumerate(prompts)]
    for i, ids in heard.ids.items():
        assert ids == answer([i % 900 + 3, 7], 12)
