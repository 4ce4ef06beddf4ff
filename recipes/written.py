"""Questions written by rule: over paragraphs of an encyclopedia, and over invented chronicles.

    relation_questions(paragraph)      "Who directed The Big Bird Cage?"
    place_questions(paragraph, rng)    "The Latin Library started in which year?", from its own sentence
    two_part_questions(paragraph)      "Who directed The Big Bird Cage, and when was it released?"
    Chronicle(rng).question()          a fact in the record of an invented place, with misleading entries

The chronicles resemble the text of `make demo` in their form only: no place, person, object or question is
that of the demo or of `benchmarks/small_model.py` (`FORBIDDEN` is checked by `prepare_135m.py`).
"""

from __future__ import annotations

import calendar
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from recipes.questions import Paragraph, Question

FORBIDDEN = (
    "clock tower", "school bell", "lindhavn", "lindqvist", "bakery oven", "ferry", "morning star",
    "town hall", "cannon", "signe aas", "reading room", "globe", "mail bag", "customs house", "bees",
    "hives", "stork", "chapel roof", "340 crowns", "pier",
)  # fmt: skip
"""Words of the demo and of the benchmark that no chronicle may hold."""

# --- paragraphs of an encyclopedia ----------------------------------------------------------------

MONTHS = "|".join(calendar.month_name[1:])
DATE = rf"(?:\d{{1,2}} (?:{MONTHS}) \d{{4}}|(?:{MONTHS}) \d{{1,2}}, \d{{4}})"
NAME = r"[A-Z][\w.'\u2019-]+(?: (?:[A-Z][\w.'\u2019-]+|de|van|von|of|the|la))*(?: [A-Z][\w.'\u2019-]+)?"
PLACE = (
    r"[A-Z][\w'\u2019-]+(?: [A-Z][\w'\u2019-]+)*(?:, [A-Z][\w'\u2019-]+(?: [A-Z][\w'\u2019-]+)*)?"
)

RELATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"\bborn (?:on )?({DATE})", ("When was {0} born?", "What is {0}'s date of birth?", "On what date was {0} born?")),
    (rf"\bborn in ({PLACE})", ("Where was {0} born?", "In which place was {0} born?", "What is the birthplace of {0}?")),
    (rf"\bdied (?:on )?({DATE})", ("When did {0} die?", "On what date did {0} die?")),
    (rf"[\u2013-] ({DATE})\)", ("When did {0} die?", "What is the date of {0}'s death?")),
    (rf"\bdirected by ({NAME})", ("Who directed {0}?", "Who was the director of {0}?", "Who is {0} directed by?")),
    (rf"\bwritten by ({NAME})", ("Who wrote {0}?", "Who is the author of {0}?", "By whom was {0} written?")),
    (rf"\bproduced by ({NAME})", ("Who produced {0}?", "Who was the producer of {0}?")),
    (rf"\bstarring ({NAME})", ("Who starred in {0}?", "Which actor stars in {0}?")),
    (rf"\bpublished by ({NAME})", ("Who published {0}?", "Which publisher brought out {0}?")),
    (rf"\bfounded by ({NAME})", ("Who founded {0}?", "Who was the founder of {0}?")),
    (r"\bfounded in (\d{4})", ("When was {0} founded?", "In which year was {0} established?")),
    (r"\bestablished in (\d{4})", ("When was {0} established?", "In what year was {0} founded?")),
    (rf"\breleased (?:on |in )({DATE}|\d{{4}})", ("When was {0} released?", "When did {0} come out?")),
    (rf"\blocated in ({PLACE})", ("Where is {0} located?", "In which place is {0}?", "Where does {0} lie?")),
    (rf"\bheadquartered in ({PLACE})", ("Where is {0} headquartered?", "Where are the headquarters of {0}?")),
    (rf"\bbased in ({PLACE})", ("Where is {0} based?", "In which city is {0} based?")),
    (rf"\bdesigned by ({NAME})", ("Who designed {0}?", "Who was the designer of {0}?", "Who drew up the plans of {0}?")),
    (rf"\bcomposed by ({NAME})", ("Who composed {0}?", "Who was the composer of {0}?")),
    (rf"\bcreated by ({NAME})", ("Who created {0}?", "Who is the creator of {0}?")),
    (rf"\bdeveloped by ({NAME})", ("Who developed {0}?", "Which company developed {0}?")),
    (rf"\brecorded by ({NAME})", ("Who recorded {0}?", "Who is the artist behind {0}?")),
    (rf"\balbum by (?:American |British |English |Canadian )?(?:[a-z]+ ){{0,4}}({NAME})", ("Whose album is {0}?", "Who made the album {0}?")),
    (rf"\bowned by ({NAME})", ("Who owns {0}?", "Who is the owner of {0}?")),
    (rf"\bnamed after ({NAME})", ("After whom or what is {0} named?", "Who is {0} named after?")),
    (r"\bpopulation (?:of|was) ([\d,]+\d)", ("What is the population of {0}?", "How many people live in {0}?")),
    (r"\bopened in (\d{4})", ("When did {0} open?", "In which year was {0} opened?")),
    (r"\bbuilt in (\d{4})", ("When was {0} built?", "In what year was {0} constructed?")),
    (rf"\bpremiered on ({DATE})", ("When did {0} premiere?", "On what date was {0} first shown?")),
    (r"\bin the family ([A-Z]\w+)", ("To which family does {0} belong?", "What family is {0} in?")),
    (rf"\bgraduated from ({NAME})", ("Where did {0} graduate?", "Which school did {0} graduate from?")),
    (rf"\bplays for ({NAME})", ("Which team does {0} play for?", "For whom does {0} play?")),
    (rf"\bmarried (?:to )?({NAME})", ("Whom did {0} marry?", "Who was {0}'s spouse?")),
    (r"\bbest known for (?:his|her|their) ((?:[\w'\u2019-]+ ){1,6}[\w'\u2019-]+)[.,;]", ("What is {0} best known for?",)),
    (r"\bis an? ((?:[A-Z][\w-]+ )?(?:[a-z][\w-]+ ){0,3}(?:actor|actress|singer|writer|politician|footballer|player|director|composer|author|journalist|poet|painter|lawyer|producer|musician|historian|scientist))\b", ("What is {0}'s occupation?", "What does {0} do for a living?", "Who is {0}?")),
)  # fmt: skip


def relation_questions(paragraph: Paragraph) -> Iterator[Question]:
    """What a paragraph says about the thing in its title."""
    subject = re.sub(r" \([^)]*\)$", "", paragraph.title)
    for number, sentence in enumerate(paragraph.sentences):
        if number and not sentence.startswith((subject, "It ", "He ", "She ", "The ", "They ")):
            continue
        for kind, (pattern, wordings) in enumerate(RELATIONS):
            match = re.search(pattern, sentence)
            if match is None or not _is_answer(match.group(1), subject):
                continue
            rng = random.Random(f"{paragraph.title}/{number}/{kind}")
            yield Question(
                id=f"relation/{paragraph.title}/{number}/{kind}",
                text=rng.choice(wordings).format(subject),
                answers=(match.group(1),),
                gold=(
                    Paragraph(
                        title=paragraph.title, sentences=paragraph.sentences, support=(number,)
                    ),
                ),
                hard=(),
                is_titled=True,
            )


OF_PEOPLE = re.compile(
    r"\b(born|birth|birthplace|die|death|occupation|living|marry|spouse|play|graduate)\b"
)
JOINTS = (", and ", " and ", ", and also ")


def both_asked(one: tuple[str, str], other: tuple[str, str], rng: random.Random) -> tuple[str, str]:
    """Two questions as one, and both answers in their order."""
    second = other[0][0].lower() + other[0][1:]
    return f"{one[0].rstrip('?')}{rng.choice(JOINTS)}{second}", f"{one[1]}, {other[1]}"


def two_part_questions(paragraph: Paragraph) -> Iterator[Question]:
    """Two things that a paragraph says about its title, asked at once."""
    found = list(relation_questions(paragraph))
    subject = re.sub(r" \([^)]*\)$", "", paragraph.title)
    for one, other in pairwise(found):
        [first], [second] = one.answers, other.answers
        is_same = one.id.rpartition("/")[2] == other.id.rpartition("/")[2]
        if is_same or first in second or second in first or "," in first + second:
            continue
        rng = random.Random(f"{one.id}/{other.id}")
        is_person = OF_PEOPLE.search(f"{one.text} {other.text}")
        again = subject if is_person or rng.random() < 0.3 else "it"
        pair = (one.text, first), (other.text.replace(subject, again), second)
        text, answer = both_asked(*pair, rng)
        support = tuple(sorted({*one.gold[0].support, *other.gold[0].support}))
        yield replace(
            one,
            id=f"both/{one.id}/{other.id}",
            text=text,
            answers=(answer,),
            gold=(replace(one.gold[0], support=support),),
        )


NO_ANSWERS = frozenset(
    (*calendar.month_name[1:], "American", "British", "English", "Canadian", "French", "University")
)


def _is_answer(answer: str, subject: str) -> bool:
    if answer in NO_ANSWERS or answer.endswith((".", "and")) or answer in subject:
        return False
    return len(answer) >= 2 and len(answer.split()) <= 8


SYNONYMS = {
    "began": "started", "located": "situated", "won": "received", "large": "big", "film": "movie",
    "built": "constructed", "founded": "established", "wrote": "authored", "famous": "well-known",
    "company": "firm", "purchased": "bought", "attempted": "tried", "created": "made",
    "largest": "biggest", "commenced": "began", "near": "close to", "children": "kids",
    "physician": "doctor", "received": "got", "located in": "in", "served": "worked", "died": "passed away",
    "released": "brought out", "established": "set up", "received the": "was given the", "annual": "yearly",
    "originally": "at first", "currently": "now", "approximately": "about", "featured": "presented",
    "including": "among them", "became": "turned into", "teaches": "gives lessons in", "several": "some",
    "primarily": "mainly", "appointed": "named", "assisted": "helped", "returned": "came back",
    "town": "place", "members": "people", "produced": "made", "joined": "entered", "killed": "slain",
    "song": "track", "book": "volume", "moved": "went", "acquired": "took over", "announced": "made known",
}  # fmt: skip
OPENERS = ("", "", "", "According to the text, ", "Do you know: ", "The text says: ")
SPANS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"\bon ({DATE})", ("on what date", "on which day", "when")),
    (r"\bin (\d{4})\b", ("in what year", "in which year", "when")),
    (r"\b(\d[\d,.]*\d|\d)(?= (?:people|students|members|miles|km|metres|feet|episodes|goals|games|seats|years|times|votes|species|acres|songs|residents|inhabitants|passengers|employees))", ("how many",)),
    (r"\bby ((?:[A-Z][\w.'\u2019-]+ ){1,2}[A-Z][\w.'\u2019-]+)", ("by whom", "by which person")),
    (r"\bin ((?:[A-Z][\w'\u2019-]+)(?:, [A-Z][\w'\u2019-]+)?)", ("in which place", "where")),
    (r"\b(?:called|named|titled) (\"[^\"]{3,40}\"|(?:[A-Z][\w'\u2019-]+ ?){1,4})", ("what",)),
    (r"\bas ((?:a |an |the )(?:[a-z-]+ ){1,3}[a-z-]+)(?=[.,;])", ("as what",)),
    (r"\bfrom ((?:the )?[A-Z][\w'\u2019-]+(?: [A-Z][\w'\u2019-]+)*)", ("from where", "from which source")),
    (r"\bbecause (?:of )?((?:[\w'\u2019-]+ ){2,8}[\w'\u2019-]+)(?=[.,;])", ("for what reason", "why")),
    (r"\bwith ((?:[A-Z][\w.'\u2019-]+ )+[A-Z][\w.'\u2019-]+)", ("with whom",)),
    (r"\bfor ((?:the )?(?:[A-Z][\w'\u2019-]+ ?){2,5})(?=[.,;])", ("for whom or what",)),
    (r"\bto ((?:the )?(?:[A-Z][\w'\u2019-]+ ?){2,4})(?=[.,;])", ("to whom or what",)),
)  # fmt: skip
PREPOSITION = re.compile(r"\b(?:on|in|by|as|from|because(?: of)?|with|for|to)$")


def place_questions(paragraph: Paragraph, rng: random.Random) -> Iterator[Question]:
    """A sentence with a gap as a question, some of its words replaced."""
    numbers = list(range(len(paragraph.sentences)))
    rng.shuffle(numbers)
    for number in numbers:
        sentence = paragraph.sentences[number]
        if not 7 <= len(sentence.split()) <= 32:
            continue
        spans = list(SPANS)
        rng.shuffle(spans)
        for pattern, wordings in spans:
            match = re.search(pattern, sentence)
            if match is None or not _is_answer(match.group(1).strip(), paragraph.title):
                continue
            text = _asked(paragraph.title, number, sentence, match, wordings, rng)
            if text is None:
                continue
            yield Question(
                id=f"place/{paragraph.title}/{number}",
                text=text,
                answers=(match.group(1).strip().strip('"'),),
                gold=(
                    Paragraph(
                        title=paragraph.title, sentences=paragraph.sentences, support=(number,)
                    ),
                ),
                hard=(),
                is_titled=True,
            )
            break


def _asked(
    title: str,
    number: int,
    sentence: str,
    match: re.Match[str],
    wordings: tuple[str, ...],
    rng: random.Random,
) -> str | None:
    before, after = sentence[: match.start(1)].rstrip(), sentence[match.end(1) :]
    asked = rng.choice(wordings)
    if " " in asked or asked in ("when", "where", "why"):  # it has its preposition
        before = PREPOSITION.sub("", before).rstrip()
    before = re.sub(r"\s*\([^)]*\)", "", before)
    if len(before.split()) < 3 or "(" in before:
        return None
    subject = re.sub(r" \([^)]*\)$", "", title)
    first, _, rest = before.partition(" ")
    if first in ("It", "He", "She", "They") and rest:
        before = f"{subject} {rest}"
    elif number and subject not in before and rng.random() < 0.7:
        before = (
            f"{before[0].lower()}{before[1:]}" if first in ("The", "In", "A", "This") else before
        )
        before = f"about {subject}: {before}"
    if rng.random() < 0.5:
        words = [
            SYNONYMS.get(word, word) if rng.random() < 0.7 else word for word in before.split()
        ]
        before = " ".join(words)
    tail = ""
    if rng.random() < 0.4:
        tail = re.split(r"[.;(]", after)[0].rstrip(" ,")
        tail = tail if len(tail.split()) <= 10 else ""
    form = rng.random()
    if form < 0.35 and not tail:
        text = f"{asked} {before[0].lower() + before[1:] if before.split()[0] in ('The', 'In', 'A') else before}?"
    else:
        text = f"{rng.choice(OPENERS)}{before} {asked}{tail}?"
    text = " ".join(text.split())
    return text[0].upper() + text[1:] if len(text.split()) <= 34 else None


# --- chronicles -----------------------------------------------------------------------------------

FIRST = (
    "Abel", "Ines", "Tomas", "Greta", "Pavel", "Odile", "Ruben", "Selma", "Hugo", "Carmen", "Ivo", "Lena",
    "Matteo", "Noor", "Oskar", "Petra", "Quentin", "Rosa", "Stefan", "Tilda", "Ulrich", "Vera", "Walter",
    "Xenia", "Yusuf", "Zelda", "Arthur", "Beatrix", "Conrad", "Delia", "Emil", "Flora", "Georg", "Harriet",
    "Ignaz", "Judith", "Kaspar", "Lydia", "Moritz", "Nadia", "Otto", "Paula", "Rafael", "Sabine", "Theo",
    "Una", "Viktor", "Wanda", "Amir", "Bronwen", "Cyril", "Dinah", "Elias", "Faye", "Gideon", "Hilda",
)  # fmt: skip
LAST = (
    "Adler", "Barros", "Calloway", "Dufour", "Engel", "Farkas", "Gallo", "Haddad", "Ibsen", "Jansky", "Keller",
    "Lorenz", "Marchetti", "Novak", "Okafor", "Pereira", "Quist", "Renard", "Santos", "Tremaine", "Ulmer",
    "Varga", "Weiss", "Yates", "Zimmer", "Ashby", "Brandt", "Crane", "Drummond", "Elwood", "Fontaine",
    "Grimaldi", "Hollis", "Ivanov", "Jarrett", "Kowalski", "Lambert", "Mercer", "Norwood", "Ortega", "Pruitt",
    "Rowan", "Sorel", "Thorne", "Underhill", "Vance", "Whitlock", "Bell", "Castellan", "Demir", "Eklund",
)  # fmt: skip
TOWNS = (
    "Altenbruck", "Bracken Hill", "Corvale", "Dunmere", "Estrella", "Fallowfield", "Grimsand", "Hollin",
    "Iverstone", "Jarrow Cross", "Kestrel Bay", "Lowmoor", "Marisol", "Nettleford", "Oxenholt", "Pellworth",
    "Quarry Bank", "Rossano", "Silverdale", "Thornwick", "Umberley", "Vallon", "Westering", "Yarrow", "Zellin",
)  # fmt: skip
BODIES = (
    "convent", "observatory", "lighthouse", "railway company", "mining camp", "hospital", "theatre", "botanical garden",
    "whaling station", "vineyard", "printing house", "academy", "garrison", "expedition", "monastery", "glassworks",
    "harbour office", "museum", "orphanage", "shipyard", "tea estate", "post office", "parish", "county court",
)  # fmt: skip
ROLES = (
    "gardener", "porter", "cook", "bookkeeper", "surgeon", "engineer", "night watchman", "carpenter", "librarian",
    "stoker", "abbess", "foreman", "telegraph clerk", "blacksmith", "sexton", "quartermaster", "glazier", "midwife",
    "organist", "printer", "saddler", "steward", "laundress", "caretaker", "pilot", "janitor", "secretary",
)  # fmt: skip
BUILDINGS = (
    "granary", "north wing", "boiler house", "infirmary", "wine cellar", "signal box", "winter garden", "engine shed",
    "library", "guard house", "refectory", "smithy", "tower room", "stables", "dye house", "ice house", "laundry",
    "armoury", "counting house", "orchard", "dry dock", "upper gallery", "archive vault", "kitchen court", "powder store",
    "sawmill", "bath house", "map room", "assay office", "greenhouse",
)  # fmt: skip
OBJECTS = (
    "brass telescope", "silver chalice", "account book", "master seal", "ship's compass", "velvet curtain",
    "medicine chest", "signal lamp", "iron strongbox", "copper still", "oil portrait", "fire hose", "marble bust",
    "surveyor's chain", "barometer", "wax tablets", "flag of honour", "harpsichord", "second ledger", "deed of sale",
    "cellar key", "safe key", "key to the gate", "key to the vault", "letter of credit", "spare anchor", "chessboard",
    "field glasses", "baptismal bowl", "weather vane", "treasury key", "lantern of the watch", "first edition",
    "christening robe", "wedding ring of the founder", "prize cup", "blue tapestry", "printing plate", "diary of the founder",
)  # fmt: skip
MADE = (
    ("great window", "painted"), ("iron gate", "forged"), ("new organ", "built"), ("stone fountain", "carved"),
    ("altar cloth", "woven"), ("bronze statue", "cast"), ("church clock", "made"), ("memorial plaque", "engraved"),
    ("fire bell", "cast"), ("ceiling of the hall", "painted"), ("new staircase", "built"), ("title page", "drawn"),
    ("weather vane", "forged"), ("stage curtain", "sewn"), ("ship's figurehead", "carved"), ("sundial", "made"),
    ("copper roof", "laid"), ("mosaic floor", "laid"), ("anthem", "composed"), ("ship's bell", "cast"),
    ("oak door", "carved"), ("stained glass", "designed"), ("water wheel", "repaired"), ("hymn book", "printed"),
    ("dinner service", "painted"), ("bridge railing", "forged"), ("steam engine", "repaired"), ("carriage", "built"),
)  # fmt: skip
SPOTS = (
    "under the third stair of", "behind the stove in", "in a tin box above the door of", "inside the hollow post beside",
    "beneath the loose tile near", "on the top shelf of", "in the drawer of the desk in", "behind the mirror in",
    "in the barrel nearest the door of", "under a floorboard of", "in the niche to the left of", "inside the piano in",
    "behind the portrait in", "in the chimney of", "wrapped in oilcloth under", "on a nail behind the door of",
    "in the flour bin of", "at the bottom of the well beside", "between two beams of", "in the lining of a coat in",
)  # fmt: skip
ANIMALS = (
    "seven goats", "a tame fox", "three peacocks", "a blind mule", "two otters", "fourteen ducks", "a grey parrot",
    "silkworms", "carrier pigeons", "a pair of mastiffs", "nine geese", "a tortoise", "angora rabbits", "a young bear",
)  # fmt: skip
FINDS = (
    "a Roman coin", "a leather purse", "the skull of a horse", "a sealed bottle", "a gold buckle", "a rusted sword",
    "a bundle of letters", "a clay whistle", "an ivory comb", "a lead coffin", "a fossil shell", "a silver thimble",
)  # fmt: skip
BIRDS = ("owls", "ravens", "swifts", "herons", "falcons", "jackdaws", "kingfishers", "cranes")
COLOURS = (
    "dark blue",
    "cream",
    "crimson",
    "pale yellow",
    "olive",
    "black",
    "violet",
    "orange",
    "silver grey",
    "rust red",
)
MONEY = (
    "crowns",
    "florins",
    "dollars",
    "guilders",
    "pounds",
    "marks",
    "pesos",
    "francs",
    "thalers",
    "shillings",
)
GOODS = (
    "coffee", "tallow", "iron nails", "linen", "cedar boards", "quicksilver", "gunpowder", "candles", "glass panes", "salt",
    "olive oil", "copper wire", "ink", "canvas", "lamp glass", "seed potatoes", "tobacco", "bricks", "indigo", "coal",
)  # fmt: skip
SHIPS = (
    "Albatross",
    "Good Hope",
    "Marianne",
    "Black Swan",
    "Perseverance",
    "Lucky Star",
    "Halcyon",
    "Dauntless",
    "Aurora",
)
REASONS = (
    "the roof had begun to leak", "two beams were found rotten", "the inspector had not signed the papers",
    "fever had broken out among the workers", "the money was needed for the dam", "the boiler had cracked",
    "nobody could find the plans", "the river had washed away the path", "the paint was not yet dry",
)  # fmt: skip
SUBJECTS = (
    "Latin",
    "fencing",
    "navigation",
    "drawing",
    "arithmetic",
    "bookbinding",
    "botany",
    "French",
    "swimming",
)
ITEMS = (
    "chairs",
    "maps",
    "blankets",
    "muskets",
    "violins",
    "lamps",
    "beds",
    "wagons",
    "paintings",
    "horses",
    "boats",
    "clocks",
)

SKY = (
    "Snow fell all day and the roads were closed.", "A warm wind blew from the south.", "Thunder was heard before noon.",
    "The night was clear and very still.", "Heavy dew lay on the grass until nine.", "Hail broke eleven panes.",
    "The sky was overcast and the air close.", "A dust storm passed to the east.", "The first ice was seen on the pond.",
    "Sunshine all day.", "It drizzled, and the yard turned to mud.", "A sea mist came up and did not lift.",
)  # fmt: skip
HAPPENED = (
    "{p}, {r}, was given leave to visit a sister in {t}.", "{n} crates of {g} arrived from {t} and were counted twice.",
    "{p} asked for new tools and was refused.", "The {b} was swept and the windows opened.", "{p} and {q} were seen arguing behind the {b}.",
    "A complaint of {p} about the noise from the {b} was heard.", "{n} yards of {g} were sold to {q} for {m} {c}.",
    "The {r} reported that the lock of the {b} is worn out.", "A letter from {t} was read; {p} will answer it.",
    "{p} fell from a ladder in the {b} and was bandaged by the {r}.", "Visitors from {t} were shown the {b} by {p}.",
    "{q} paid {m} {c} towards the debt of last year.", "The stock of {g} is down to {n} pounds.", "{p} was absent without excuse.",
    "A dance was held in the {b}, and {p} played until midnight.", "The price of {g} fell by {n} per cent.",
    "{p} promised to mend the roof of the {b} before the feast.", "The wages of {n} workers were paid out by the {r}.",
    "A fire in the {b} was put out by {p} and {q} before it could spread.", "{p} bought {n} sacks of {g} at the market in {t}.",
    "The {r} has asked for a helper, since {p} is ill.", "An inspector from {t} looked at the {b} and wrote nothing down.",
    "{n} guests sat down to supper; {q} gave the toast.", "{p} lost a wager of {m} {c} to {q}.",
    "The road to {t} is open again.", "A cart of {g} stood in the rain because {p} had forgotten it.",
    "The {b} is to be used as a store until spring.", "{q} left for {t} with the evening coach.",
)  # fmt: skip
CLOSING = (
    "Nothing further.", "The book was closed at six.", "{p} countersigned.", "All were in good health.", "See the letter of {p}.",
    "This was put to a vote and carried.", "It was left for another day.", "The {r} made a copy of this.", "So far the report of {p}.",
)  # fmt: skip
HINTS = (
    "The {s} was talked about again, and nothing came of it.", "Some had asked for news of the {s}, but there was none.",
    "{p} remarked that the {s} had been a matter of dispute for years.", "A boy was scolded for a joke about the {s}.",
    "The old {s} was sold to a dealer from {t} long ago.", "A drawing of the {s} hangs in the {b}.",
    "It was asked who would look after the {s}, and the council put it off.",
)  # fmt: skip


TWO_PART_SHARE = 0.35
"""Questions about a fact that ask for two things, where it has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A fact of a chronicle: a sentence, and questions about it with their answers."""

    subject: str
    sentence: str
    asked: tuple[tuple[str, str], ...]


class Chronicle:
    """Dated entries of an invented place, in one of several forms."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._body, self._town = rng.choice(BODIES), rng.choice(TOWNS)
        self._people = [self._person() for _ in range(rng.randint(6, 16))]
        self._form = rng.choice(("date", "date", "iso", "day", "none", "number"))
        self._year = rng.randint(1720, 1990)
        self._money = rng.choice(MONEY)
        self._number = rng.randint(1, 400)

    @property
    def heading(self) -> str:
        """What stands above the entries."""
        wording = self._rng.choice(
            ("Records of the {} of {}", "DAYBOOK OF THE {} AT {}", "The {} of {}: a chronicle")
        )
        return wording.format(self._body, self._town)

    def question(self, num_hints: int) -> Question:
        """A fact in an entry, and entries that only mention its subject, or state other facts."""
        rng = self._rng
        told = self._told()
        text, answer = self._asked(told)
        gold = self.entry(told.sentence)
        hard = [
            self.entry(self._filled(rng.choice(HINTS)).replace("{s}", told.subject))
            for _ in range(num_hints)
        ]
        hard += [
            self.entry(other.sentence)
            for other in (self._told() for _ in range(num_hints))
            if other.subject != told.subject
        ]
        return Question(
            id=f"chronicle/{rng.getrandbits(64):x}",
            text=text,
            answers=(answer,),
            gold=(Paragraph(title="", sentences=gold, support=(gold.index(told.sentence),)),),
            hard=tuple(Paragraph(title="", sentences=one) for one in hard),
            is_titled=True,
        )

    def _asked(self, told: Told) -> tuple[str, str]:
        """One thing, or two that differ."""
        rng = self._rng
        single = [one for one in told.asked if ", " not in one[1]]
        pairs = [
            (one, other)
            for one in single
            for other in single
            if one[1] not in other[1] and other[1] not in one[1] and one[1] not in other[0]
            and other[1] not in one[0]
        ]  # fmt: skip
        if pairs and rng.random() < TWO_PART_SHARE:
            both = [one for one in told.asked if ", " in one[1]]
            return (
                rng.choice(both)
                if both and rng.random() < 0.7
                else both_asked(*rng.choice(pairs), rng)
            )
        return rng.choice(told.asked)

    def entries(self) -> Iterator[Paragraph]:
        """Entries without end."""
        while True:
            extra = self._told().sentence if self._rng.random() < 0.15 else None
            yield Paragraph(title="", sentences=self.entry(extra))

    def entry(self, fact: str | None) -> tuple[str, ...]:
        """The sentences of an entry."""
        rng = self._rng
        sentences = [self._filled(one) for one in rng.sample(HAPPENED, rng.randint(1, 3))]
        if rng.random() < 0.6:
            sentences.insert(0, rng.choice(SKY))
        if fact is not None:
            sentences.insert(rng.randint(0, len(sentences)), fact)
        if rng.random() < 0.6:
            sentences.append(self._filled(rng.choice(CLOSING)))
        head = self._head()
        return (head, *sentences) if head else tuple(sentences)

    def _head(self) -> str:
        rng = self._rng
        day, month = rng.randint(1, 28), rng.randint(1, 12)
        self._number += 1
        return {
            "date": f"{day} {calendar.month_name[month]} {self._year}.",
            "iso": f"{self._year}-{month:02}-{day:02}:",
            "day": f"{calendar.month_name[month]} {day}.",
            "none": "",
            "number": f"No. {self._number}.",
        }[self._form]

    def _person(self) -> str:
        return f"{self._rng.choice(FIRST)} {self._rng.choice(LAST)}"

    def _filled(self, text: str) -> str:
        rng = self._rng
        p, q = rng.sample(self._people, 2)
        values = {
            "p": p, "q": q, "r": rng.choice(ROLES), "t": rng.choice(TOWNS), "b": rng.choice(BUILDINGS),
            "g": rng.choice(GOODS), "n": rng.randint(2, 60), "m": rng.randint(3, 900), "c": self._money, "s": "{s}",
        }  # fmt: skip
        filled = text.format(**values)
        return filled[0].upper() + filled[1:]

    def _told(self) -> Told:
        rng = self._rng
        return rng.choice(
            (self._kept, self._made, self._made, self._named, self._coloured, self._found, self._taught, self._owned,
             self._returned, self._animals, self._nest, self._closed, self._shipped, self._long, self._owed, self._followed,
             self._hour, self._left, self._dug)
        )()  # fmt: skip

    def _somewhere(self) -> str:
        return f"{self._rng.choice(SPOTS)} the {self._rng.choice(BUILDINGS)}"

    def _kept(self) -> Told:
        rng = self._rng
        thing = (
            f"{rng.choice(OBJECTS)} of the {rng.choice(BUILDINGS)}"
            if rng.random() < 0.6
            else rng.choice(OBJECTS)
        )
        where, said = (
            self._somewhere(),
            rng.choice(("is kept", "is hidden", "lies", "has been put", "is stored")),
        )
        asked = {"lies": "Where does the {} lie?"}.get(
            said, f"Where {said.split()[0]} the {{}} {' '.join(said.split()[1:])}?"
        )
        asked = rng.choice(
            (
                asked,
                "Where can the {} be found?",
                "Where is the {}?",
                "What is the hiding place of the {}?",
            )
        ).format(thing)
        return Told(subject=thing, sentence=f"The {thing} {said} {where}.", asked=((asked, where),))

    def _made(self) -> Told:
        rng = self._rng
        thing, verb = rng.choice(MADE)
        who, sum_ = self._person(), f"{rng.randint(4, 2000)} {self._money}"
        wordings = (
            "The {t} was {v} by {w}, and {s} were paid for it.", "For the {t}, {v} by {w}, {s} were paid.",
            "{w} {v2} the {t} and received {s} for it.", "The {t} was {v} by {w} at a price of {s}, paid in two parts.",
            "{s} went to {w}, by whom the {t} was {v}.",
        )  # fmt: skip
        past = {"woven": "wove", "drawn": "drew", "sewn": "sewed"}.get(verb, verb)
        both = (
            f"Who {past} the {thing}, and how much was paid for it?", f"By whom was the {thing} {verb}, and at what price?",
            f"Who {past} the {thing} and what did it cost?", f"What did the {thing} cost, and who {past} it?",
        )  # fmt: skip
        asked = [
            (f"Who {past} the {thing}?", who), (f"How much was paid for the {thing}?", sum_), (f"What did the {thing} cost?", sum_),
            *((one, f"{sum_}, {who}" if one.startswith("What") else f"{who}, {sum_}") for one in both),
        ]  # fmt: skip
        sentence = rng.choice(wordings).format(t=thing, v=verb, v2=past, w=who, s=sum_)
        return Told(subject=thing, sentence=sentence, asked=tuple(asked))

    def _named(self) -> Told:
        rng = self._rng
        thing, name = (
            rng.choice(
                (
                    "new barge",
                    "foal",
                    "locomotive",
                    "pilot boat",
                    "fire engine",
                    "calf",
                    "tug",
                    "balloon",
                )
            ),
            rng.choice(SHIPS),
        )
        who = self._person()
        sentence = rng.choice(
            (
                f"The {thing} was christened {name} by {who}.",
                f"{who} chose the name {name} for the {thing}.",
            )
        )
        return Told(
            subject=thing,
            sentence=sentence,
            asked=(
                (f"What is the name of the {thing}?", name),
                (f"Who named the {thing}?", who),
                (f"What is the {thing} called?", name),
            ),
        )

    def _coloured(self) -> Told:
        rng = self._rng
        thing, colour = (
            rng.choice((*BUILDINGS, "coach", "fence", "rowing boat", "front gate", "flagpole")),
            rng.choice(COLOURS),
        )
        wordings = (
            "It was decided that the {} will be painted {}.",
            "The {} is to be painted {} before winter.",
            "The {} was painted {}.",
        )
        sentence = rng.choice(wordings).format(thing, colour)
        return Told(
            subject=thing,
            sentence=sentence,
            asked=(
                (f"Which colour is the {thing} painted?", colour),
                (f"What colour will the {thing} be?", colour),
            ),
        )

    def _found(self) -> Told:
        rng = self._rng
        role, what, where = (
            rng.choice(ROLES),
            rng.choice(FINDS),
            f"{rng.choice(('below', 'behind', 'under the floor of', 'in the wall of'))} the {rng.choice(BUILDINGS)}",
        )
        sentence = rng.choice(
            (
                f"The {role} found {what} {where}.",
                f"While digging, the {role} came upon {what} {where}.",
            )
        )
        return Told(
            subject=role,
            sentence=sentence,
            asked=(
                (f"What did the {role} find {where}?", what),
                (f"Who found {what}?", f"the {role}"),
                (f"Where was {what} found?", where),
            ),
        )

    def _taught(self) -> Told:
        subject, who, town = self._rng.choice(SUBJECTS), self._person(), self._rng.choice(TOWNS)
        sentence = self._rng.choice(
            (
                f"{subject[0].upper()}{subject[1:]} is taught by {who}, who came from {town}.",
                f"{who} of {town} gives the lessons in {subject}.",
            )
        )
        return Told(
            subject=f"teacher of {subject}",
            sentence=sentence,
            asked=(
                (f"Who teaches {subject}?", who),
                (f"What does {who} teach?", subject),
                (f"Where does the teacher of {subject} come from?", town),
            ),
        )

    def _owned(self) -> Told:
        body, num, items = (
            self._rng.choice(BODIES),
            str(self._rng.randint(3, 900)),
            self._rng.choice(ITEMS),
        )
        sentence = self._rng.choice(
            (
                f"The {body} now owns {num} {items}.",
                f"{num} {items} belong to the {body}.",
                f"At the last count the {body} had {num} {items}.",
            )
        )
        return Told(
            subject=body,
            sentence=sentence,
            asked=(
                (f"How many {items} does the {body} own?", num),
                (f"How many {items} belong to the {body}?", num),
            ),
        )

    def _returned(self) -> Told:
        thing, where = self._rng.choice(OBJECTS), self._somewhere()
        sentence = self._rng.choice(
            (
                f"The missing {thing} turned up {where}.",
                f"The {thing}, long thought lost, was discovered {where}.",
            )
        )
        return Told(
            subject=f"missing {thing}",
            sentence=sentence,
            asked=(
                (f"Where did the missing {thing} turn up?", where),
                (f"Where was the lost {thing} discovered?", where),
            ),
        )

    def _animals(self) -> Told:
        role, what, where = (
            self._rng.choice(ROLES),
            self._rng.choice(ANIMALS),
            f"behind the {self._rng.choice(BUILDINGS)}",
        )
        sentence = f"The {role} keeps {what} {where}, which the neighbours dislike."
        return Told(
            subject=role,
            sentence=sentence,
            asked=(
                (f"What does the {role} keep {where}?", what),
                (f"Which animals does the {role} have?", what),
                (f"Who keeps {what}?", f"the {role}"),
            ),
        )

    def _nest(self) -> Told:
        birds, where = self._rng.choice(BIRDS), f"on the roof of the {self._rng.choice(BUILDINGS)}"
        return Told(
            subject=birds,
            sentence=f"A pair of {birds} has begun to nest {where}.",
            asked=((f"Which birds nest {where}?", birds), (f"Where do the {birds} nest?", where)),
        )

    def _closed(self) -> Told:
        where, why = self._rng.choice(BUILDINGS), self._rng.choice(REASONS)
        sentence = self._rng.choice(
            (f"The {where} was closed because {why}.", f"Since {why}, the {where} has been closed.")
        )
        return Told(
            subject=where,
            sentence=sentence,
            asked=(
                (f"Why was the {where} closed?", why),
                (f"Which building was closed because {why}?", f"the {where}"),
            ),
        )

    def _shipped(self) -> Told:
        goods, town, ship, num = (
            self._rng.choice(GOODS),
            self._rng.choice(TOWNS),
            self._rng.choice(SHIPS),
            str(self._rng.randint(5, 800)),
        )
        sentence = f"The {ship} brought {num} tons of {goods} from {town}."
        return Told(
            subject=ship,
            sentence=sentence,
            asked=(
                (f"Which ship brought the {goods} from {town}?", ship),
                (f"What did the {ship} bring, and from where?", f"{num} tons of {goods}, {town}"),
                (f"How many tons of {goods} did the {ship} bring?", num),
                (f"From where did the {ship} come?", town),
            ),
        )

    def _long(self) -> Told:
        thing, num = (
            self._rng.choice(
                ("new wall", "bridge", "tunnel", "mast", "rope walk", "canal", "avenue", "trench")
            ),
            f"{self._rng.randint(8, 900)} {self._rng.choice(('feet', 'paces', 'yards', 'metres'))}",
        )
        return Told(
            subject=thing,
            sentence=f"The {thing} was measured and is {num} long.",
            asked=(
                (f"How long is the {thing}?", num),
                (f"What is the length of the {thing}?", num),
            ),
        )

    def _owed(self) -> Told:
        one, other, num, goods = (
            self._person(),
            self._person(),
            f"{self._rng.randint(2, 700)} {self._money}",
            self._rng.choice(GOODS),
        )
        return Told(
            subject=one,
            sentence=f"{one} owes {other} {num} for {goods}.",
            asked=(
                (f"How much does {one} owe {other}?", num),
                (f"To whom does {one} owe money?", other),
                (f"For what does {one} owe money to {other}?", goods),
                (f"Who owes {other} money, and how much?", f"{one}, {num}"),
            ),
        )

    def _followed(self) -> Told:
        one, other, role = self._person(), self._person(), self._rng.choice(ROLES)
        sentence = self._rng.choice(
            (f"{one} succeeds {other} as {role}.", f"In place of {other}, {one} was made {role}.")
        )
        return Told(
            subject=role,
            sentence=sentence,
            asked=(
                (f"Who is the new {role}?", one),
                (f"Who was {role} before {one}?", other),
                (f"Who took the place of {other} as {role}?", one),
            ),
        )

    def _hour(self) -> Told:
        what, hour = (
            self._rng.choice(
                ("auction", "sermon", "concert", "trial", "race", "lecture", "banquet", "drill")
            ),
            f"{self._rng.choice(('half past', 'a quarter to', 'ten past'))} {self._rng.choice(('six', 'seven', 'eight', 'nine', 'ten', 'four'))}",
        )
        where = self._rng.choice(BUILDINGS)
        return Told(
            subject=what,
            sentence=f"The {what} begins at {hour} in the {where}.",
            asked=(
                (f"At what time does the {what} begin?", hour),
                (f"Where is the {what} held?", f"in the {where}"),
                (f"When and where does the {what} begin?", f"{hour}, in the {where}"),
            ),
        )

    def _left(self) -> Told:
        one, heir, thing = self._person(), self._person(), self._rng.choice(OBJECTS)
        return Told(
            subject=thing,
            sentence=f"By the will of {one}, the {thing} goes to {heir}.",
            asked=(
                (f"Who inherits the {thing}?", heir),
                (f"Who left the {thing} to {heir}?", one),
                (f"What does {heir} inherit from {one}?", f"the {thing}"),
            ),
        )

    def _dug(self) -> Told:
        who, num, what = (
            self._person(),
            str(self._rng.randint(2, 90)),
            self._rng.choice(("apple trees", "rose bushes", "vines", "lime trees", "chestnuts")),
        )
        where = self._rng.choice(BUILDINGS)
        return Told(
            subject=what,
            sentence=f"{who} planted {num} {what} beside the {where}.",
            asked=(
                (f"Who planted the {what} beside the {where}?", who),
                (f"How many {what} were planted beside the {where}?", num),
                (f"What did {who} plant?", what),
            ),
        )
