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

from memagent.data.tasks.beyond.words import GIVEN_NAMES, SURNAMES

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
