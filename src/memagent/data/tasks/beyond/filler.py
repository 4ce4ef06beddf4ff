"""Prose that says nothing: sentences made by a small grammar, different by the thousand.

    sentences(rng)    At dusk the old cooper carried a cracked lantern along the towpath.
                      "It will be a hard winter," said Ilse Garland.
                      ...

A sentence is drawn as a pattern, then one phrase for each slot of it. There are millions of them. No
pattern states what a task asks about: nobody visits, sells, is born or holds an office here, and no
figures stand in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

# --- names and other words ------------------------------------------------------------------------

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


MIN_PARAGRAPH, MAX_PARAGRAPH = 3, 7
"""Sentences in a paragraph."""

SHORT_SENTENCES = (
    "It rained.",
    "Nobody spoke.",
    "A dog barked.",
    "The wind turned.",
    "All was quiet.",
    "Time went by.",
    "Snow fell.",
)
"""For the last few tokens of a length."""


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.replace("\n", " ").split("|"))


_ROLES = _phrases(
    """
    miller | ferryman | clerk | cooper | widow | schoolteacher | carpenter | weaver | gardener |
    shepherd | stranger | nurse | piper | cook | traveller | blacksmith | sexton | lodger | pilot |
    tailor | glazier | beekeeper | innkeeper | surveyor | tinker | drover | student | printer |
    fisherman | seamstress | mason | postman | fiddler | watchmaker | boatbuilder | farmhand
    """
)
_MANNERS = _phrases(
    """
    old | young | tall | tired | cheerful | quiet | stubborn | nervous | patient | sleepy | stern |
    careful | kindly | hungry | proud | absent-minded | red-haired | soft-spoken | limping
    """
)
_TIMES = _phrases(
    """
    at dusk | before breakfast | late in the autumn | one windy morning | after the storm |
    in those years | when the bells had stopped | towards evening | on the way home | at first light |
    that same week | during the long frost | some days afterwards | in the middle of the night |
    while the kettle sang | at low tide | when the guests had left | early in the spring |
    after a long silence | without any warning | as usual | for the first time in months
    """
)
_DID = _phrases(
    """
    carried | dropped | mended | hid | admired | painted | borrowed | examined | polished | forgot |
    wrapped up | looked for | found | dragged | measured | described | lifted | cleaned | pushed |
    held on to | pointed at | drew | shook | turned over | put down | stared at | guarded
    """
)
_QUALITIES = _phrases(
    """
    cracked | heavy | yellow | dusty | broken | polished | crooked | faded | borrowed | wooden | rusty |
    monstrous | torn | silver | narrow | painted | muddy | half-empty | patched | forgotten | woollen |
    sooty | plain | curious | carved | battered
    """
)
_THINGS = _phrases(
    """
    lantern | basket | ladder | umbrella | kettle | rope | saddle | mirror | trunk | clock | fiddle |
    barrel | blanket | map | wheel | shutter | stool | bucket | candlestick | coat | drum | globe |
    spade | sack | bell | lute | jug | boot | cushion | net | chair | plough | birdcage | chessboard
    """
)
_WHERE = _phrases(
    """
    along the towpath | behind the stables | by the old well | under the lime trees | on the stairs |
    beside the stove | across the meadow | near the ford | in the back garden | at the edge of the wood |
    on the bridge | in the attic | below the weir | through the orchard | over the stile |
    in the long grass | at the foot of the hill | between the haystacks | outside the bakery |
    down the lane | on the jetty | among the beehives | in the empty hall | past the boathouse
    """
)
_WHY = _phrases(
    """
    because the roof was leaking | although nobody had asked for it | as if nothing had happened |
    because the light was failing | in spite of the cold | and thought no more about it |
    since there was little else to do | to the surprise of the whole street | and smiled |
    because the road was flooded | until the candle burned down | without a word |
    and then went to sleep | for reasons that were never explained | and hummed a tune |
    as the fog came in from the river | while the children laughed | and sighed
    """
)
_SCENERY = _phrases(
    """
    the river | the road to the coast | the market square | the chapel yard | the upper field |
    the long street | the beech wood | the mill pond | the cellar | the station platform | the marsh |
    the kitchen | the quay | the hillside | the old wall | the courtyard | the sky over the bay
    """
)
_LOOKED = _phrases(
    """
    lay in deep shadow | smelled of wet leaves | was silent for once | looked smaller than before |
    shone after the rain | had changed very little | was full of mist | was white with frost |
    seemed to belong to another time | was loud with starlings | lay deserted | glittered in the sun |
    was covered with straw | echoed with footsteps | was darker than usual | had an air of neglect
    """
)
_SPOKE = _phrases(
    """
    talked with | argued with | laughed with | walked home with | waited for | wrote a long letter to |
    played cards with | shared a loaf with | nodded to | told a story to | went fishing with |
    listened to | hurried after | made peace with | sang for | quarrelled with
    """
)
_TOPICS = _phrases(
    """
    the weather | the price of hay | an old song | the state of the roads | their childhood |
    the new curtains | a dream | the shape of the clouds | the habits of owls | the last harvest |
    a broken promise | the best way to bake rye bread | the noise upstairs | a ghost in the mill |
    the length of the winter | lost gloves | the taste of the water | ships that never came back
    """
)
_SAYINGS = _phrases(
    """
    it will be a hard winter | nobody mends things any more | the soup is getting cold |
    I never trusted that clock | we ought to start before noon | the geese are restless again |
    you should have seen the waves | there is always another train | my knees tell me it will rain |
    the best apples are at the top | one gets used to the noise | I left my gloves somewhere |
    that is not how the song goes | the fog will lift by noon | somebody has moved the ladder |
    it was warmer when we were young | the cat has been at the butter | we shall need more candles
    """
)
_SAID = _phrases("said | whispered | muttered | called | replied | insisted | remarked | sighed")
_FEELINGS = _phrases(
    """
    was fond of long walks | disliked loud music | had a weakness for plum cake | kept a diary |
    never wore a hat | could whistle like a blackbird | knew every path in the wood |
    was afraid of thunder | slept badly | collected feathers | liked to be alone |
    had a habit of humming | believed in omens | could not sit still | told the same joke twice |
    was proud of the new boots | missed the sea | counted sheep in vain
    """
)
_WEATHER = _phrases(
    """
    rain drummed on the slates | the wind dropped | a thin snow began to fall | the sun broke through |
    thunder rolled behind the hills | the fog thickened | hail rattled against the panes |
    the air grew still | clouds gathered in the west | the moon rose above the barns |
    the tide crept over the sand | swallows flew low | the first stars appeared | smoke hung in the air
    """
)
_JOINED = _phrases(
    """
    and the lamps were lit | and somewhere a door slammed | but nobody seemed to mind |
    and the horses grew uneasy | so the washing was taken in | and the dogs began to howl |
    but the work went on | and the boats came in early | and the street emptied | but not for long |
    and the windows were shut one by one | so supper was late | and the geese fell silent
    """
)

Slot = tuple[str, ...]
_PATTERNS: tuple[tuple[Slot, ...], ...] = (
    (_TIMES, (" the ",), _MANNERS, (" ",), _ROLES, (" ",), _DID, (" a ",), _QUALITIES, (" ",),
     _THINGS, (" ",), _WHERE),
    (("the ",), _ROLES, (" ",), _DID, (" the ",), _QUALITIES, (" ",), _THINGS, (" ",), _WHY),
    (_SCENERY, (" ",), _LOOKED, (", and the ",), _ROLES, (" ",), _FEELINGS),
    (_TIMES, (" ",), _SCENERY, (" ",), _LOOKED, (", ",), _JOINED),
    (_WEATHER, (" ",), _TIMES, (", ",), _JOINED),
    (GIVEN_NAMES, (" ",), SURNAMES, (" ",), _SPOKE, (" the ",), _MANNERS, (" ",), _ROLES,
     (" and spoke of ",), _TOPICS),
    (GIVEN_NAMES, (" ",), SURNAMES, (" ",), _FEELINGS, (", as the ",), _ROLES, (" knew",)),
    (("the ",), _MANNERS, (" ",), _ROLES, (" ",), _SPOKE, (" ",), GIVEN_NAMES, (" ",), SURNAMES,
     (" ",), _WHERE),
    (("the ",), _ROLES, (" and the ",), _ROLES, (" talked about ",), _TOPICS, (" ",), _WHERE),
    (_TIMES, (" ",), GIVEN_NAMES, (" ",), SURNAMES, (" ",), _DID, (" a ",), _QUALITIES, (" ",),
     _THINGS),
    (('"',), _SAYINGS, ('," ',), _SAID, (" the ",), _MANNERS, (" ",), _ROLES, (" ",), _WHERE),
    (('"',), _SAYINGS, ('," ',), _SAID, (" ",), GIVEN_NAMES, (" ",), SURNAMES),
    (("a ",), _QUALITIES, (" ",), _THINGS, (" stood ",), _WHERE, (", and nobody knew why",)),
    (("the ",), _ROLES, (", who ",), _FEELINGS, (", ",), _DID, (" the ",), _THINGS, (" ",), _WHY),
)  # fmt: skip


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences without end."""
    draw, num_patterns = rng.random, len(_PATTERNS)
    while True:
        pattern = _PATTERNS[int(draw() * num_patterns)]
        words = "".join([slot[int(draw() * len(slot))] for slot in pattern])
        first = 1 if words[0] == '"' else 0
        yield f"{words[:first]}{words[first].upper()}{words[first + 1 :]}."
