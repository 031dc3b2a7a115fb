"""How byte-level BPE vocabularies split a text before merging, by ``tokenizer.ggml.pre``.

A GGUF file has the vocabulary and the merges of such a tokenizer, but of its pre-tokenizer only a
name, which llama.cpp's converter gives it. The patterns are those of the models' tokenizer.json
files; the names are listed in
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN_2 = rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN_3_5 = f"{_CONTRACTION}|{_MARKED}|{_SPACES}"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT_4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED = (
    rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ"
    "ⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with a case, as DeepSeek's tokenizer.json lists them."""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _DEEPSEEK_HAN,
    r"\p{N}",
)


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """What happens to a text before merges.

    Attributes:
        patterns: split it one after the other; matches and what is between them are parts.
        ignores_merges: whether a part that is a token is that token, whatever the merges say.
        adds_bos: whether texts begin with the BOS token if the file does not say.
        nfc: whether the model's own tokenizer normalizes to NFC first. llama.cpp does not.
        falcon: whether digits are split off after bytes have become characters.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False
    falcon: bool = False


_GPT2 = PreTokenization((_GPT_2,))
_LLAMA3 = PreTokenization((_LLAMA_3,))
_LLAMA_BPE = replace(_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenization((_QWEN_2,))
_DIGITS = PreTokenization((r"\p{N}", _GPT_2))
_GPT4O = PreTokenization((_GPT_4O,))
_DEEPSEEK3 = PreTokenization(_DEEPSEEK_3)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
            *("lfm2", "jina-v5-nano"),
        ),
        _LLAMA_BPE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, ignores_merges=True)),
    "qwen2": replace(_QWEN2, nfc=True),
    **dict.fromkeys(
        (
            *("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"),
            *("solar-open", "grok-2"),
        ),
        _QWEN2,
    ),
    "qwen35": PreTokenization((_QWEN_3_5,), nfc=True),
    "tekken": PreTokenization((_TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "trillion"),
            *("exaone4", "granite-docling"),
        ),
        _GPT2,
    ),
    **dict.fromkeys(("olmo", "mpt"), replace(_GPT2, nfc=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    "command-r": replace(_DIGITS, nfc=True),
    "falcon": PreTokenization((_GPT_2,), falcon=True),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), PreTokenization((_BLOOM,))),
    "viking": PreTokenization((_BLOOM, r"\p{N}")),
    "deepseek-llm": PreTokenization(_DEEPSEEK),
    "deepseek-coder": PreTokenization(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "seed-coder": PreTokenization((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenization((_BAILING,))),
}
"""By name. Others are refused: a similar pattern would give wrong ids without a sign of it."""
