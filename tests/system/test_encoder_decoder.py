"""A real server of a miniature T5, and a client of Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

from tests.system.conftest import StartServer
from tests.tools.checkpoints import write_tokenizer
from tests.tools.seq2seq import Oracle, make

PROMPT = "translate english to german: the house is small"
NEW = 12


def test_a_t5_answers_over_http(start_server: StartServer, tmp_path: Path) -> None:
    vocabulary = 400
    make("T5ForConditionalGeneration", tmp_path, vocab_size=vocabulary)
    write_tokenizer(tmp_path, vocabulary)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    wanted = Oracle(tmp_path)(ids, NEW)
    server = start_server(
        "--model-id", str(tmp_path), "--dtype", "float32", "--max-total-tokens", "128"
    )
    server.wait_ready()
    client = InferenceClient(server.url)
    http = httpx.Client(base_url=server.url, timeout=60)
    answer = client.text_generation(
        PROMPT, max_new_tokens=NEW, details=True, decoder_input_details=True
    )
    assert [token.id for token in answer.details.tokens] == wanted
    assert answer.generated_text == tokenizer.decode(wanted)
    assert [(each.id, each.logprob) for each in answer.details.prefill] == [(0, None)]
    streamed = client.text_generation(PROMPT, max_new_tokens=NEW, stream=True)
    assert "".join(streamed) == answer.generated_text
    info = http.get("/info").json()
    assert info["model_pipeline_tag"] == "text2text-generation"
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (128, 127)
    usage = http.post(
        "/v1/completions",
        json={"model": "tgi", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0},
    ).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    chat = http.post(
        "/v1/chat/completions",
        json={"model": "tgi", "messages": [{"role": "user", "content": "Hi"}]},
    )
    assert chat.status_code == 400, "there is no chat template"
    several = http.post(
        "/generate",
        json={
            "inputs": PROMPT,
            "parameters": {"best_of": 2, "do_sample": True, "details": True,
                           "max_new_tokens": NEW},
        },
    ).json()  # fmt: skip
    assert len(several["details"]["best_of_sequences"]) == 1
    constrained = http.post(
        "/generate",
        json={
            "inputs": PROMPT,
            "parameters": {"grammar": {"type": "regex", "value": "[0-9]{3}"}, "max_new_tokens": 8},
        },
    ).json()["generated_text"]
    assert len(constrained) == 3
    assert constrained.isdigit()
    http.close()
