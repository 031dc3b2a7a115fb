"""Language tokens of prompts and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.text import tiny, translation
from tgi_cli.text.languages import LanguageError, Languages, Translation
from tgi_cli.text.tokenizer import Tokenizer


@pytest.mark.parametrize("behind", [False, True])
def test_the_source_takes_the_place_of_the_tokenizers_own(behind: bool, tmp_path: Path) -> None:
    translation.write_nllb(tmp_path, behind)
    tokenizer = Tokenizer.load(tmp_path)
    languages = Languages(tokenizer)
    own, other = (tokenizer.backend.token_to_id(code) for code in ("eng_Latn", "zho_Hans"))
    prompt = tokenizer.encode("the fox")
    assert prompt[-1 if behind else 0] == own
    made = languages.prompt(prompt, Translation(source="zho_Hans"))
    assert made == [other if each == own else each for each in prompt]
    assert languages.prompt(prompt, Translation(target="zho_Hans")) == prompt
    assert languages.prompt(prompt, Translation()) == prompt


def test_the_target_begins_the_answer(tmp_path: Path) -> None:
    backend = translation.write_nllb(tmp_path)
    languages = Languages(Tokenizer.load(tmp_path))
    wanted = backend.token_to_id("deu_Latn")
    start = backend.token_to_id("</s>")
    assert languages.first_id(Translation(target="deu_Latn"), [start]) == wanted
    assert languages.first_id(Translation(source="deu_Latn"), [start]) is None
    for given in ([], [wanted]):
        with pytest.raises(LanguageError, match="`tgt_lang`: the model is not told"):
            languages.first_id(Translation(target="deu_Latn"), given)


def test_codes_are_spelled_as_the_model_spells_them(tmp_path: Path) -> None:
    ids = translation.write_m2m100(tmp_path / "m2m")
    tokenizer = Tokenizer.load(tmp_path / "m2m")
    languages = Languages(tokenizer)
    german = tokenizer.backend.token_to_id("__de__")
    for code in ("de", "__de__"):
        assert languages.first_id(Translation(target=code), [ids["</s>"]]) == german
        assert languages.prompt(tokenizer.encode("the"), Translation(source=code))[0] == german


def test_a_prompt_of_marian_begins_with_its_target(tmp_path: Path) -> None:
    ids = translation.write_marian(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    languages = Languages(tokenizer)
    made = languages.prompt(tokenizer.encode("the fox"), Translation(target="nld"))
    assert made == tokenizer.encode(">>nld<< the fox")
    assert languages.first_id(Translation(target="nld"), [ids["<pad>"]]) is None
    with pytest.raises(LanguageError, match="`src_lang`: the model is not told"):
        languages.prompt(made, Translation(source="deu"))


def test_unknown_languages_are_errors_that_name_some(tmp_path: Path) -> None:
    translation.write_nllb(tmp_path / "nllb")
    tokenizer = Tokenizer.load(tmp_path / "nllb")
    languages = Languages(tokenizer)
    with pytest.raises(LanguageError, match="only deu_Latn, eng_Latn, zho_Hans") as caught:
        languages.prompt([], Translation(target="fra_Latn"))
    assert caught.value.param == "tgt_lang"
    with pytest.raises(LanguageError, match="truncated") as caught:
        languages.prompt(tokenizer.encode("the fox")[1:], Translation(source="deu_Latn"))
    assert caught.value.param == "src_lang"
    bare = Languages(Tokenizer.load(tiny.write_model(tmp_path / "tiny")))
    with pytest.raises(LanguageError, match="has no languages"):
        bare.prompt([1], Translation(source="the"))
