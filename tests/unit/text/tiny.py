"""Small real tokenizers: byte-level like Llama 3's, and byte-fallback like Llama 2's."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def read_json(path): return json.load(open(path))",
    "Hello, world! How are you today? I am fine, thank you.",
    "Grüße aus Köln, übermorgen fährt der Zug nach Österreich.",
    "深層学習は機械学習の一分野です 🤗",
] * 4

BOS, EOS, START = "<|begin|>", "<|im_end|>", "<|im_start|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """Every text can be encoded; non-ASCII characters take several ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [line.encode("ascii", "ignore").decode() for line in CORPUS], trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a marked space; characters outside the vocabulary fall apart into bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({letter for line in CORPUS for letter in line if letter.isascii()})
    pieces += ["▁", *(letter for letter in letters if letter != " ")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("▁", "the"), ("l", "l"), ("▁", "w"), ("o", "r")):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


def write_model(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A model folder as far as text is concerned."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": EOS, "special": True}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
