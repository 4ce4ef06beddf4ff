"""Encodings: found out, asked for, refused; and how fast."""

import codecs
from pathlib import Path

import pytest

from memagent.documents.encoding import decode
from memagent.documents.loaders import load
from memagent.errors import DocumentError
from tests.support.timing import cpu_seconds

FRENCH = (
    "Les élèves étaient déjà arrivés à l\u2019école quand la cloche sonna. «\u00a0Où êtes-vous "
    "passés\u00a0?\u00a0» demanda le maître, très contrarié.\n"
)
GERMAN = "Über die Straße gehören früher müde Mädchen; daß Äpfel süß schmecken, wußte man schon.\n"
SPANISH = "El niño soñó con una mañana de otoño en España. ¿Qué pasó después? ¡Jamás lo sabrá!\n"
FINNISH = (
    "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan, äiti sanoi.\n"
)
POLISH = (
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są zażółć.\n"
)
CZECH = "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv, řekl žluťoučký kůň.\n"
TURKISH = "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdan, ağaç.\n"  # noqa: RUF001
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастна по-своему.\n"  # noqa: RUF001
GREEK = "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.\n"  # noqa: RUF001
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"
CHINESE = "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。及秦灭之后，又并入于汉。\n"  # noqa: RUF001
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FRENCH, "cp1252"),
        (FRENCH, "mac_roman"),
        (GERMAN, "latin-1"),
        (SPANISH, "latin-1"),
        (FINNISH, "latin-1"),
        (POLISH, "cp1250"),
        (POLISH, "iso-8859-2"),
        (CZECH, "cp1250"),
        (CZECH, "iso-8859-2"),
        (TURKISH, "cp1254"),
        (RUSSIAN, "koi8-r"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "cp866"),
        (GREEK, "cp1253"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        (CHINESE, "gb18030"),
        (CHINESE, "gbk"),
        (KOREAN, "cp949"),
    ],
)
@pytest.mark.parametrize("times", [3, 200])
def test_the_encoding_of_a_paragraph_is_found_out(text: str, encoding: str, times: int) -> None:
    assert decode((text * times).encode(encoding), "a.txt") == text * times


@pytest.mark.parametrize("text", ["café", "naïve résumé", "Gödel, Escher, Bach", "señor\n"])
def test_a_few_accents_are_taken_for_western(text: str) -> None:
    assert decode(text.encode("cp1252"), "a.txt") == text


@pytest.mark.parametrize(
    ("bom", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_byte_order_mark_decides_and_is_dropped(
    tmp_path: Path, bom: bytes, encoding: str
) -> None:
    (tmp_path / "a.txt").write_bytes(bom + "Text € 文".encode(encoding))
    assert load([tmp_path / "a.txt"]).text == "Text € 文"


def test_a_mark_that_does_not_keep_its_promise_is_refused() -> None:
    with pytest.raises(DocumentError, match="begins with the mark of utf-8, but byte 4"):
        decode(codecs.BOM_UTF8 + b"a\xff", "a.txt")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [("plain english\n" * 50_000 + FRENCH, "cp1252"), ((RUSSIAN.strip() + " ") * 20_000, "koi8-r")],
    ids=["late", "in an endless line"],
)
def test_accents_late_or_in_one_line_are_found_out(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding), "a.txt") == text


def test_a_byte_that_breaks_utf8_is_named_rather_than_guessed_around() -> None:
    half = RUSSIAN.encode() * 50
    expected = rf"a.txt is utf-8 but for byte {len(half)} \(0xff\); repair it"
    with pytest.raises(DocumentError, match=expected):
        decode(half + b"\xff" + half, "a.txt")


def test_utf8_cut_in_a_character_is_named() -> None:
    with pytest.raises(DocumentError, match="is utf-8 but for byte"):
        decode((JAPANESE * 10).encode()[:-2], "a.txt")


def test_text_that_turns_binary_is_refused() -> None:
    with pytest.raises(DocumentError, match="is binary"):
        decode(b"#!/bin/sh\nexec installer\n" * 1000 + b"\xff\xfe\0\0", "setup.sh")


def test_colours_of_a_terminal_are_not_binary() -> None:
    assert decode(b"\x1b[31mred\x1b[0m\n", "a.log") == "\x1b[31mred\x1b[0m\n"


# --- asked for ------------------------------------------------------------------------------------


def test_the_encoding_asked_for_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("utf-16-le"))
    (tmp_path / "b.txt").write_bytes("é".encode("cp1252"))
    assert load([tmp_path / "a.txt"], encoding="utf-16-le").text == "naïve"
    assert load([tmp_path / "b.txt"], encoding="cp437").text == "Θ"


def test_a_wrong_encoding_names_the_byte_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Voilà l'été".encode("cp1252"))
    with pytest.raises(DocumentError, match=r"a.txt is not utf-8: byte 4 \(0xe0\) does not decode"):
        load([tmp_path / "a.txt"], encoding="utf-8")


def test_an_encoding_that_gives_control_characters_is_refused() -> None:
    with pytest.raises(DocumentError, match="is full of control characters"):
        decode("text".encode("utf-16-le"), "a.txt", encoding="latin-1")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("utf8x", "did you mean utf8"), ("klingon", "names look like"), ("hex", "no text encoding")],
)
def test_an_unknown_encoding_is_refused_before_any_file_is_read(name: str, hint: str) -> None:
    with pytest.raises(DocumentError, match=hint):
        load(["no-such-file.txt"], encoding=name)


# --- speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "encoding", "factor"),
    [
        ("It was a bright cold day in April € the clocks were striking.\n", "utf-8", 10),
        (GERMAN, "latin-1", 60),
    ],
    ids=["utf-8", "latin-1"],
)
def test_loading_costs_a_few_times_what_decoding_does(
    tmp_path: Path, sentence: str, encoding: str, factor: float
) -> None:
    path, text = tmp_path / "a.txt", sentence * (15_000_000 // len(sentence))
    path.write_bytes(text.encode(encoding))
    assert load([path]).text == text
    decoding = cpu_seconds(lambda: path.read_bytes().decode(encoding))
    assert cpu_seconds(lambda: load([path])) < factor * decoding
