"""Tokenizers of Marian and M2M100, made of SentencePiece models and vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.text import translation
from tests.unit.text.translation import BPE, SOURCE_PIECES, spm, write_m2m100, write_marian
from tgi_cli.errors import ModelError
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.sentencepiece_file import ModelType, PieceType, SentencePieceFile
from tgi_cli.text.tokenizer import Tokenizer


def test_a_file_has_pieces_with_scores_and_types() -> None:
    read = SentencePieceFile.parse(spm(SOURCE_PIECES, BPE, adds_prefix=False))
    assert {piece.text: piece.score for piece in read.pieces[3:]} == SOURCE_PIECES
    assert [piece.type for piece in read.pieces[:4]] == [
        PieceType.UNKNOWN,
        PieceType.CONTROL,
        PieceType.CONTROL,
        PieceType.NORMAL,
    ]
    assert (read.model_type, read.adds_prefix, read.removes_spaces) == (ModelType.BPE, False, True)


@pytest.mark.parametrize("data", [b"", b"{}", spm(SOURCE_PIECES)[:40], b"\x0b", b"\x80" * 11])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"SentencePiece|cut off"):
        SentencePieceFile.parse(data)


def test_a_text_is_cut_by_the_sources_pieces_and_has_ids_of_the_vocabulary(tmp_path: Path) -> None:
    ids = write_marian(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    pieces = ["\u2581the", "\u2581fox", "es", "</s>"]
    assert tokenizer.encode("the foxes") == [ids[piece] for piece in pieces]
    assert tokenizer.encode("  the   foxes ") == tokenizer.encode("the foxes")
    assert tokenizer.adds_space
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.special_ids >= {ids["</s>"], ids["<pad>"], ids["<unk>"], ids[">>deu<<"]}


def test_the_targets_pieces_do_not_encode(tmp_path: Path) -> None:
    """But single characters do, which would be unknown otherwise."""
    ids = write_marian(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert ids["\u2581thefox"] not in tokenizer.encode("thefox")
    assert tokenizer.encode("fox!")[-2:] == [ids["!"], ids["</s>"]]
    assert tokenizer.encode("foxйй")[-2:] == [ids["<unk>"], ids["</s>"]], "as one unknown token"


def test_answers_are_decoded_with_the_vocabulary(tmp_path: Path) -> None:
    ids = write_marian(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    answer = [ids["\u2581die"], ids["\u2581Fuchs"], ids["e"], ids["!"], ids["</s>"]]
    assert tokenizer.decode(answer) == "die Fuchse!"
    assert tokenizer.surface(ids["\u2581Fuchs"]) == " Fuchs"
    stream = Detokenizer(tokenizer, [ids["<pad>"]])
    assert "".join(map(stream.push, answer)) + stream.flush() == "die Fuchse!"


def test_a_target_language_in_the_text_is_its_token(tmp_path: Path) -> None:
    ids = write_marian(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    named = tokenizer.encode(">>nld<< the fox")
    assert named == [ids[">>nld<<"], *tokenizer.encode("the fox")]


def test_m2m100_has_its_languages_behind_the_vocabulary(tmp_path: Path) -> None:
    ids = write_m2m100(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    english, german = (len(ids) + index for index in (18, 16))
    assert tokenizer.backend.token_to_id("__en__") == english
    assert tokenizer.backend.token_to_id("__de__") == german
    assert tokenizer.backend.token_to_id("__zu__") == len(ids) + 99
    assert tokenizer.vocab_size == len(ids) + 100
    assert tokenizer.encode("the") == [english, ids["\u2581the"], ids["</s>"]]
    assert tokenizer.encode("hes")[1:-1] == [ids[each] for each in ("\u2581", "h", "e", "s")]
    assert tokenizer.decode([german, ids["\u2581the"], ids["s"], ids["</s>"]]) == "thes"


def test_the_config_of_m2m100_names_the_source_and_the_set_of_languages(tmp_path: Path) -> None:
    ids = write_m2m100(tmp_path, src_lang="de", language_codes="wmt21")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == len(ids) + 8
    assert tokenizer.encode("the")[0] == len(ids) + 7


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_marian(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"separate_vocabs": True}))
    with pytest.raises(ModelError, match="a vocabulary for each language"):
        Tokenizer.load(tmp_path)
    write_marian(tmp_path)
    (tmp_path / "source.spm").write_bytes(spm(SOURCE_PIECES, model_type=3))
    with pytest.raises(ModelError, match=r"source\.spm cannot be used"):
        Tokenizer.load(tmp_path)
    (tmp_path / "source.spm").write_bytes(b"oops")
    with pytest.raises(ModelError, match=r"source\.spm cannot be read"):
        Tokenizer.load(tmp_path)
    write_marian(tmp_path)
    for vocabulary in ([], {"</s>": 0}, {"</s>": 0, "<unk>": 0}, {"</s>": 0, "<unk>": 9}):
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        with pytest.raises(ModelError, match=r"vocab\.json is no vocabulary"):
            Tokenizer.load(tmp_path)
    translation.write_m2m100(tmp_path / "other", language_codes="none")
    with pytest.raises(ModelError, match="'none'"):
        Tokenizer.load(tmp_path / "other")
    translation.write_m2m100(tmp_path / "other", src_lang="xx")
    with pytest.raises(ModelError, match="src_lang"):
        Tokenizer.load(tmp_path / "other")
