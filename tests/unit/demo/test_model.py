"""The bundled checkpoint: it loads, speaks its language, and stops."""

import ast
import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from tests.tools.demo import tokenizer as tokens
from tests.tools.demo.train import perplexity
from tgi_cli.demo import heldout_text, model_path

# The card states the whole text's perplexity; its first and last pages are easier and give 10.4.
HELDOUT_PERPLEXITY_AT_MOST = 11.0


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return the checkpoint in float32."""
    return LlamaForCausalLM.from_pretrained(model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(model_path())


def _continue(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int
) -> list[int]:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=count, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def _ask(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str
) -> tuple[str, int]:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = _continue(model, tokenizer, prompt, 128)
    return tokenizer.decode(ids, skip_special_tokens=True), ids[-1]


def test_folder_is_small_enough_to_ship() -> None:
    files = [path for path in model_path().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.name for path in files} >= {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_shape_exercises_grouped_queries_and_tied_embeddings() -> None:
    config = json.loads((model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 2048


@pytest.mark.parametrize(
    "text",
    [
        'def f(x):\n    """Doc."""\n\n\treturn x ** 2  # \\n\r\n',
        "naïve café — “quotes” … Ελληνικά, русский, 日本語, العربية",
        "🙂👩‍👩‍👧‍👦🇫🇷 \u200b\u0000\x7f",
        "   leading, trailing and      inner spaces   ",
    ],
)
def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == 4096


def test_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What is len?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == tokens.render(messages)
    assert rendered == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nWhat is len?<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == f"{rendered}<|im_start|>assistant\n"
    specials = {tokenizer.convert_tokens_to_ids(token) for token in tokens.SPECIAL_TOKENS}
    assert specials == {0, 1, 2}
    assert tokenizer.eos_token_id == tokens.TURN_END_ID


def test_code_continues_as_code(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = tokenizer.decode(_continue(model, tokenizer, "def read_json(path):", 64))
    body, _, _ = text.partition("\n\n")
    (function,) = ast.parse(f"def read_json(path):{body}").body
    assert isinstance(function, ast.FunctionDef)
    assert ast.get_docstring(function)
    assert isinstance(function.body[-1], ast.Return)


def test_prose_continues_as_documentation(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = tokenizer.decode(_continue(model, tokenizer, "The function returns", 24))
    assert text.startswith(" ")
    words = text.split()
    assert sum(word.isalpha() for word in words) > 0.4 * len(words)
    assert len(set(words)) > 0.6 * len(words), "it does not just repeat itself"


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What does os.path.join do?", "`os.path.join`: "),
        ("Explain json.dumps", "`json.dumps`: "),
        ("What is Deep Learning?", "Deep learning"),
        ("Hello!", "Hello! Ask me about the Python standard library."),
        ("What is the weather in Paris?", "I do not know."),
    ],
)
def test_chat_answers_and_stops(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str, expected: str
) -> None:
    answer, last = _ask(model, tokenizer, question)
    assert answer.startswith(expected)
    assert len(answer) > len("`json.dumps`: ") + 10
    assert last == tokens.TURN_END_ID


def test_heldout_text_is_understood(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = heldout_text()
    assert 60_000 <= len(text.encode()) <= 150_000
    samples = (text[:6000], text[-6000:])  # documentation, then source
    ids = [token for sample in samples for token in tokenizer(sample).input_ids]
    assert perplexity(model, ids) < HELDOUT_PERPLEXITY_AT_MOST
