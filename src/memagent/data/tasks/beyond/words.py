"""Names of people and towns, and other words, for texts that are made up.

person(rng)     "Ingrid Halloway"    one of about 13,000
towns(rng, 3)   ["Marrowick", ...]   of about 1,000
"""

from __future__ import annotations

import random

_GIVEN = """
    Ada Agnes Albin Alma Amos Anders Anika Anton Arvid Astrid Aurel Bastian Beata Benno Berit Bernt
    Birgit Bram Brida Callum Carina Caspar Cedric Clara Conrad Cora Dagny Damian Delia Dorte Edda
    Edgar Edith Einar Elias Elin Ella Elsa Emil Enid Erna Esther Ewan Fabian Felix Fenna Flora Floris
    Frida Gerda Gilbert Gisela Greta Gustav Hanna Harald Hazel Hedda Heike Helmer Henrik Hilda Hugo
    Ida Ilse Imre Ines Ingrid Irma Isak Isolde Ivar Jakob Jens Joana Jonas Josef Judith Julius Kai
    Karin Kaspar Katja Keir Klara Knut Konrad Lars Leif Lena Leopold Lina Linus Lotte Ludvig Lukas
    Magda Malin Marek Marta Mathis Matilda Maud Milan Mira Moritz Nadia Nils Nora Odette Olaf Olga
    Oscar Otto Paula Peder Petra Quentin Ragna Rasmus Rika Robin Rosa Rufus Runa Sander Selma Signe
    Silas Simon Sofia Stellan Sunniva Sven Tara Thea Tilda Tobias Tove Ulf Ulla Vera Viktor Vilma
    Walter Wanda Werner Wilma Yann Yrsa Zelda
"""
GIVEN_NAMES = tuple(_GIVEN.split())
_SURNAMES = """
    Aldous Amberg Ashdown Askeland Barrow Bellgrave Bergh Birkin Blackwood Bostrand Brandt Brenner
    Broadmoor Burrell Calder Carlow Castell Collingsby Corvin Crane Dahlgren Darnell Decker Dorn
    Drummond Eklund Elder Engstrom Fairbank Falk Fenwick Fiske Forsling Fraser Garland Gersten
    Gilmore Grafton Greve Grimsby Halloway Hammar Harrow Haldane Hearne Heller Hjort Holm Hornby
    Iverson Jarrow Jessen Kessler Kettle Kirkby Kjeldsen Klint Koppel Krantz Lambert Landau Larkin
    Lassen Lindqvist Lockwood Lund Maddox Marlow Mercer Merrick Moberg Mortensen Munk Nesbit Norling
    Northcote Nyberg Oakes Oland Orchard Osmond Pascoe Pell Pemberton Penrose Quill Quist Radcliff
    Ravn Redfern Reinholt Ridley Rosen Rowntree Rydell Sandoval Schiller Selwyn Severin Sholto
    Skov Sorrel Stark Strand Sundby Swann Tarrant Tegner Thorne Tindal Tolliver Ulrich Vance Vester
    Vinter Voss Wakefield Waldron Weller Wendt Westergaard Whitlock Winslow Wren Yardley Zeller
"""
SURNAMES = tuple(_SURNAMES.split())
_STARTS = """
    Alder Amber Barn Bell Birk Brack Bram Cold Crow Dun Elm Fal Farn Fenn Gar Grim Hallow Hark Hazel
    Hol Ivel Kell Lang Lin March Marrow Mil Nor Oster Pell Quarn Raven Ros Sel Stan Sund Thorn Tor
    Ul Wen Wick Yarr
"""
_TOWN_STARTS = tuple(_STARTS.split())
_ENDS = """
    bridge brook bury by dale den fell field ford gate ham holm hurst ley mere moor mouth ness port
    sted ton vik wick worth
"""
_TOWN_ENDS = tuple(_ENDS.split())
TOWNS = tuple(
    start + end
    for start in _TOWN_STARTS
    for end in _TOWN_ENDS
    if start.lower() != end and start[-1] != end[0]
)

_UNITS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_TEENS = """
    tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth
"""
ORDINALS = (
    *_UNITS,
    *_TEENS.split(),
    *("twentieth", *(f"twenty-{unit}" for unit in _UNITS)),
    *("thirtieth", *(f"thirty-{unit}" for unit in _UNITS)),
    "fortieth",
)
_MONTHS = """
    January February March April May June July August September October November December
"""
MONTHS = tuple(_MONTHS.split())


def person(rng: random.Random) -> str:
    """A given name and a surname."""
    return f"{rng.choice(GIVEN_NAMES)} {rng.choice(SURNAMES)}"


def people(rng: random.Random, num: int) -> list[str]:
    """Different people; no two share a given name or a surname."""
    given, surnames = rng.sample(GIVEN_NAMES, num), rng.sample(SURNAMES, num)
    return [f"{first} {last}" for first, last in zip(given, surnames, strict=True)]


def namesakes(name: str, rng: random.Random, num: int) -> list[str]:
    """Others who share the given name or the surname, by turns: easily confused, but not the same."""
    first, last = name.split()
    others = rng.sample([word for word in SURNAMES if word != last], num)
    firsts = rng.sample([word for word in GIVEN_NAMES if word != first], num)
    return [f"{first} {others[i]}" if i % 2 == 0 else f"{firsts[i]} {last}" for i in range(num)]


def other_person(rng: random.Random, taken: frozenset[str]) -> str:
    """Someone whose full name is none of those taken."""
    while (name := person(rng)) in taken:
        continue
    return name


def towns(rng: random.Random, num: int) -> list[str]:
    """Different towns."""
    return rng.sample(TOWNS, num)


def day(rng: random.Random) -> str:
    """A day of the year, such as 4 March."""
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def days(rng: random.Random, num: int) -> list[str]:
    """Different days of the year, at most 336."""
    found: list[str] = []
    while len(found) < num:
        if (new := day(rng)) not in found:
            found.append(new)
    return found
